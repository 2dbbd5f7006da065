"""Compress KV caches: profile, transform, quantization, prediction, entropy coding, container."""
