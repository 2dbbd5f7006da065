"""The stages in plain NumPy, written to be read: with `codec/FORMAT.md`, they specify the bitstream."""

from cuvee.codec.stages.reference.byte_planes import decode_layers, index_layers, split_unit
from cuvee.codec.stages.reference.class_predictor import predict_classes
from cuvee.codec.stages.reference.product import analyze, prepare_inverse, product_runs, synthesize
from cuvee.codec.stages.reference.rans import encode_classes, rans_encode
from cuvee.codec.stages.reference.sections import decode_sections, index_sections
from cuvee.codec.stages.reference.symbols import to_planes
from cuvee.codec.stages.reference.token_order import arrange
from cuvee.codec.stages.reference.transform import gather_centered, move_keys, place

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

name = "reference"
