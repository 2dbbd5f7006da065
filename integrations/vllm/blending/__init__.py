"""Blending in vLLM: place segments of earlier prompts where a prompt has them, and recompute some tokens.

blend_options  options of the engine and of each request
planning       the scheduler's side: finds segments, asks the store, decides, keeps approximate KV apart from exact KV
paged_model    the engine's layers behind `cuvee.blend.recompute_model.RecomputeModel`
executing      the workers' side: recomputes tokens among the placed segments
"""
