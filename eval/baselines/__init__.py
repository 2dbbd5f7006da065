"""Published methods, for comparisons with cuvee: casts, KIVI, CacheGen, PCA and KVTC rebuilt; KakeyaLattice and
TurboQuant by published packages.
"""
