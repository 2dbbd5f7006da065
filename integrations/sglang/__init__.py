"""SGLang: `hicache.CuveeHiCache`, a storage backend of its hierarchical cache (HiCache). SGLang loads it."""
