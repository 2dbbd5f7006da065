"""Compress KV caches: profile, transform, quantization, entropy coding, container."""
