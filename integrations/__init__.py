"""Where cuvee meets other software: caches of transformers, the KV connector of vLLM, and stores of blobs.

These adapters are thin. Whatever calculates is in `cuvee.codec` and `cuvee.kernels`.
"""
