"""Published methods, rebuilt for comparisons with cuvee: casts, KIVI, CacheGen, PCA, KVTC."""
