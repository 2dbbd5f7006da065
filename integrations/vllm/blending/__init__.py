"""Blending in vLLM: segments of earlier prompts are placed where a prompt has them, and some tokens recomputed.

options    what a user may set, for the engine and for each request
planning   the scheduler's side: finds segments, asks the store, decides, keeps approximate KV apart from exact KV
model      the engine's own layers behind `cuvee.blend.recompute_model.RecomputeModel`
executing  the workers' side: recomputes what was placed
"""
