"""What others do, rebuilt so that cuvee can be compared with it: casts, KIVI, CacheGen, PCA, KVTC."""
