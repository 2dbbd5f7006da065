"""Published methods, for comparisons with cuvee: casts, KIVI, CacheGen and PCA rebuilt; KakeyaLattice and TurboQuant
by published packages.
"""
