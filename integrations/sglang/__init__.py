"""SGLang: a storage backend for its hierarchical cache (HiCache), `hicache.CuveeHiCache`, and an external linker of its
prefix cache, `linker.CuveeLinker`. SGLang loads either.
"""
