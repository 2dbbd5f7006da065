"""Prompts put together from cached chunks at any position. Only some of their tokens are recomputed.

Segment, Blender          the pieces of a prompt; blends them into a cache that generation continues on
BlendResult, BlendRecord  what comes out, and what was recomputed
ChunkCache                chunks by content, kept in any store
HKVD, Boundary, Overlap, QueryGuided, Random, Nothing, Sum, Product, Union: which tokens are recomputed
"""

from cuvee.blend.blender import Blender, BlendRecord, BlendResult, SegmentRecord
from cuvee.blend.chunk_cache import BlobStore, ChunkCache, ChunkCounters
from cuvee.blend.hkvd import HKVD
from cuvee.blend.recompute_model import BlendModel, TransformersModel
from cuvee.blend.segments import Prompt, Segment
from cuvee.blend.selectors import (
    Boundary,
    Nothing,
    Overlap,
    Product,
    QueryGuided,
    Random,
    Scorer,
    Selection,
    Selector,
    Sum,
    Union,
    default_selector,
)

__all__ = [
    "HKVD",
    "BlendModel",
    "BlendRecord",
    "BlendResult",
    "Blender",
    "BlobStore",
    "Boundary",
    "ChunkCache",
    "ChunkCounters",
    "Nothing",
    "Overlap",
    "Product",
    "Prompt",
    "QueryGuided",
    "Random",
    "Scorer",
    "Segment",
    "SegmentRecord",
    "Selection",
    "Selector",
    "Sum",
    "TransformersModel",
    "Union",
    "default_selector",
]
