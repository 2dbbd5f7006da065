"""SGLang: a storage backend for its hierarchical cache (HiCache). `hicache.CuveeHiCache` is what SGLang loads."""
