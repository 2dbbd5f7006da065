"""Compose prompts from cached chunks at any position, and recompute only some of their tokens.

Segment, Blender          the pieces of a prompt; blends them into a cache from which generation continues
BlendResult, BlendRecord  the blended prompt; the tokens that were recomputed
ChunkCache                chunks by content, kept in any store
Guided, Boundary, Nothing: choose the tokens to recompute
"""

from cuvee.blend.blender import Blender, BlendRecord, BlendResult, SegmentRecord
from cuvee.blend.chunk_cache import ChunkCache, ChunkCounters, ChunkStore
from cuvee.blend.segments import Prompt, Segment
from cuvee.blend.selectors import Boundary, Guided, Nothing, Selector

__all__ = [
    "BlendRecord",
    "BlendResult",
    "Blender",
    "Boundary",
    "ChunkCache",
    "ChunkCounters",
    "ChunkStore",
    "Guided",
    "Nothing",
    "Prompt",
    "Segment",
    "SegmentRecord",
    "Selector",
]
