"""Models and their caches: supported architectures, dtypes, RoPE, fingerprints of weights, forward passes."""
