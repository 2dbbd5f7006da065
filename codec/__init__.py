"""Compress KV caches: profile, transform, quantisation, prediction, entropy coding, container."""
