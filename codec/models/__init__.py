"""Models and their caches: supported architectures, dtypes, RoPE, weights' fingerprints, forward passes."""
