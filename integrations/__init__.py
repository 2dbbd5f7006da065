"""Adapters to other software: caches of transformers, the KV connector of vLLM, and stores of blobs.

These adapters are thin. All calculations are in `cuvee.codec`, `cuvee.kernels` and `cuvee.blend`.
"""
