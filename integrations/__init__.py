"""Adapters to other software: caches of transformers, the KV connector of vLLM, a backend of SGLang, stores of blobs.

These adapters are thin. All calculations are in `cuvee.codec`, `cuvee.kernels` and `cuvee.blend`. Their rooms:

    identity       names of all that determines a cache: weights, adapters, the engine's options and environment
    stores         blobs by key: RAM, disk, Redis, object storage, tiers of them
    core           chunks to entries of a store and back, contained errors, costs, deadlines
    pages          engines' pages by the engine's own names: under the tier, SGLang and LMCache
    profiles       places that keep profiles, and profiles fitted to a store
    transformers   caches of transformers
    vllm           the connector: scheduler, worker, pages, blending
    vllm_tier, sglang, lmcache
"""
