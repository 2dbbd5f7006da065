"""The stages compiled by Numba, and the loops that they share. They release the GIL."""

from cuvee.codec.stages.compiled.byte_planes import decode_layers, index_layers, split_unit
from cuvee.codec.stages.compiled.class_predictor import predict_classes
from cuvee.codec.stages.compiled.integer_product import analyze
from cuvee.codec.stages.compiled.product import prepare_inverse, product_runs, synthesize
from cuvee.codec.stages.compiled.rans import encode_classes, rans_encode
from cuvee.codec.stages.compiled.sections import decode_sections, index_sections
from cuvee.codec.stages.compiled.symbols import to_planes
from cuvee.codec.stages.compiled.token_order import arrange
from cuvee.codec.stages.compiled.transform import gather_centered, move_keys, place

__all__ = [
    "analyze",
    "arrange",
    "decode_layers",
    "decode_sections",
    "encode_classes",
    "gather_centered",
    "index_layers",
    "index_sections",
    "move_keys",
    "name",
    "place",
    "predict_classes",
    "prepare_inverse",
    "product_runs",
    "rans_encode",
    "split_unit",
    "synthesize",
    "to_planes",
]

name = "numba"
