"""Position-independent reuse: prompts put together from cached chunks, of which only some tokens are recomputed.

Segment, Blender         a prompt's pieces; blends them into a cache that generation continues on
BlendResult, BlendRecord what comes out, and what was recomputed
ChunkCache               chunks by content, over any store
HKVD, Boundary, Overlap, QueryGuided, Random, Nothing, Sum, Product, Union: which tokens are recomputed
"""

from cuvee.blend.blender import Blender, BlendRecord, BlendResult, SegmentRecord
from cuvee.blend.library import BlobStore, ChunkCache, ChunkCounters
from cuvee.blend.model import BlendModel, TransformersModel
from cuvee.blend.segments import Prompt, Segment
from cuvee.blend.selectors import (
    HKVD,
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
