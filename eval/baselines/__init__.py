"""What others do, rebuilt to be compared with: casts, KIVI, CacheGen, KVTC."""
