"""Adapters to other software: caches of transformers, the KV connector of vLLM, a backend of SGLang, stores of blobs.

These adapters are thin. All calculations are in `cuvee.codec`, `cuvee.kernels` and `cuvee.blend`.
"""
