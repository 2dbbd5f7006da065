"""Models and their caches: what is measured of them, dtypes, RoPE, fingerprints of weights, forward passes."""
