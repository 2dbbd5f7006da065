"""Verify the headers and tags of blobs, which all decoding starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuvee.codec.backends import Coding
from cuvee.codec.coding.open_blob import Bytes, Expected, OpenBlob
from cuvee.codec.entropy.residuals import FINER, MAX_REFINEMENTS
from cuvee.codec.errors import CorruptError, FormatError, InputError, ProfileMismatchError
from cuvee.codec.format.container import Header, Kind, Scheme, contiguous_bytes, header_digest, read_header
from cuvee.codec.format.keys import Key, verify_tag
from cuvee.codec.format.streams import MAX_TOKENS_PER_STREAM, MIN_STREAM_BYTES
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.setting import Setting, Settings


class Opener:
    """Verifies blobs of one profile, of any quality. Without keys, they must have no tag."""

    def __init__(self, settings: Settings, keys: Sequence[Key]) -> None:
        self._settings, self._keys = settings, tuple(keys)
        self._profile: Profile = settings.profile
        self._layouts: dict[str, KVLayout] = {}

    def open(
        self, blob: Bytes, refinements: Sequence[Bytes], associated_data: bytes, expected: Expected | None = None
    ) -> OpenBlob:
        """Verify the headers and tags of a blob and its refinement: see `Codec.open`."""
        self.check_associated(associated_data)
        blob = contiguous_bytes(blob)
        header = read_header(blob)
        layout = self._check_header(header)
        if expected is not None:
            self._check_expected(header, expected)
        verify_tag(blob, header, self._keys, associated_data)
        if len(refinements) > (most := 0 if header.lossless else MAX_REFINEMENTS):
            raise InputError(f"refinements: must be at most {most} of this blob, got {len(refinements)}")
        finer = tuple(self._refinement(blob, header, refinement, associated_data) for refinement in refinements)
        return OpenBlob(blob, header, layout, self, finer)

    def opened(self, blob: Bytes | OpenBlob, refinements: Sequence[Bytes], associated_data: bytes) -> OpenBlob:
        """Open a blob unless it is open already.

        Raises:
            InputError: an open blob of another codec, or with arguments that only `open` uses.
        """
        if not isinstance(blob, OpenBlob):
            return self.open(blob, refinements, associated_data)
        if blob.opened_by is not self:
            raise InputError(
                "blob: must be opened by this codec, got an OpenBlob of another, which may have other keys: call open()"
            )
        for name, value in (("refinements", refinements), ("associated_data", associated_data)):
            if value:
                raise InputError(
                    f"{name}: must be empty for an OpenBlob, got {len(value)}: pass it to open(), which verifies it"
                )
        return blob

    def coding(self, opened: OpenBlob) -> Coding:
        """Return how the sections of a blob are coded.

        Raises:
            FormatError: the profile has learned nothing.
            ProfileError: the profile cannot code the blob's step.
        """
        header = opened.header
        if header.lossless:
            return Coding(self._profile, Setting(Scheme.LOSSLESS), header.dtype)
        if not self._profile.learned:
            raise FormatError("header: must be lossless for an unlearned profile, got a transform blob")
        refinements = len(opened.refinements)
        self._profile.check_step_index(header.step_index - FINER * refinements)
        predicted = header.token_id_bytes > 0
        setting = Setting(Scheme.TRANSFORM, header.step_index, refinements)
        return Coding(self._profile, setting, header.dtype, predicted)

    def check_associated(self, associated_data: object) -> bytes:
        """Return data that a tag can bind; raise InputError if it is none."""
        if not isinstance(associated_data, bytes):
            raise InputError(f"associated_data: must be bytes, got {type(associated_data).__name__}")
        if associated_data and not self._keys:
            raise InputError(
                f"associated_data: must be empty without a key, got {len(associated_data)} bytes: make the Codec with "
                "key=, whose tag binds a blob"
            )
        return associated_data

    def each_associated(self, associated_data: object, count: int | None) -> list[bytes]:
        """Return the data of each of `count` blobs, checked; without a count, of the one blob."""
        if associated_data is None:
            return [b""] * (1 if count is None else count)
        if count is None:
            return [self.check_associated(associated_data)]
        if not isinstance(associated_data, Sequence) or len(associated_data) != count:
            got = len(associated_data) if isinstance(associated_data, Sequence) else type(associated_data).__name__
            raise InputError(f"associated_data: must be one for each of the {count} chunks, got {got}")
        return [self.check_associated(data) for data in associated_data]

    def layout(self, dtype: str) -> KVLayout:
        """Return the layout of the model's caches of a dtype."""
        if dtype not in self._layouts:
            self._layouts[dtype] = replace(self._profile.layout, dtype=dtype)
        return self._layouts[dtype]

    def _refinement(self, base: Bytes, header: Header, finer: Bytes, associated_data: bytes) -> tuple[Bytes, Header]:
        """Verify a refinement of a base."""
        blob = contiguous_bytes(finer)
        finer_header = read_header(blob)
        verify_tag(blob, finer_header, self._keys, associated_data)
        if finer_header.kind is not Kind.REFINEMENT or finer_header.refines != header_digest(base):
            raise CorruptError("refinement: must be of this base, got one of another")
        shape, expected = (
            (each.dtype, each.tokens, each.start, each.values_per_token, each.layout, each.profile, each.schemes)
            for each in (finer_header, header)
        )
        if shape != expected or finer_header.step_index != header.step_index - FINER:
            raise FormatError(
                "refinement: must have the tokens, layout and profile of its base, at a quarter of the step"
            )
        return blob, finer_header

    def _check_expected(self, header: Header, expected: Expected) -> None:
        """Raise CorruptError unless the blob holds these tokens, at the codec's quality or without loss."""
        setting = Setting(Scheme.LOSSLESS) if header.lossless else self._settings.of(header.token_id_bytes > 0)
        actual = header.tokens, header.start, header.dtype, header.lossless, header.step_index
        start = header.start if expected.start is None else expected.start
        wanted = expected.tokens, start, expected.dtype, setting.lossless, setting.step_index
        if actual != wanted:
            raise CorruptError(f"blob: must hold {_described(*wanted)}, got {_described(*actual)}")

    def _check_header(self, header: Header) -> KVLayout:
        """Return the layout of a blob of the profile and its model; raise unless it is one."""
        if header.kind is Kind.REFINEMENT:
            raise FormatError(
                "blob: is a refinement, which decodes only with its base: pass it as refinements= of the base"
            )
        if header.kind is Kind.STATES:
            raise FormatError("blob: holds the states at the end of a cache, and no chunk: decode_states reads it")
        layout = self.layout(header.dtype)
        if header.layout != layout.fingerprint:
            raise ProfileMismatchError("blob: must hold a cache of the profile's model, got one of another model")
        if not header.lossless and header.profile != self._profile.id:
            raise ProfileMismatchError(
                f"blob: must be of profile {self._profile.id.hex()}, got profile {header.profile.hex()}: "
                "make the codec with the profile that encoded it"
            )
        sections = layout.num_layers if header.lossless else len(self._profile.sections)
        if len(header.section_bytes) != sections or header.values_per_token != layout.values_per_token:
            raise FormatError(f"header: must list {sections} sections, got {len(header.section_bytes)}")
        # The size of a section bounds its streams, and so the tokens and the memory that a header may claim.
        if min(header.section_bytes) * MAX_TOKENS_PER_STREAM < MIN_STREAM_BYTES * header.tokens:
            raise FormatError(
                f"header: must list sections that hold {header.tokens} tokens, got {min(header.section_bytes)} bytes"
            )
        return layout


def _described(tokens: int, start: int, dtype: str, lossless: bool, step_index: int) -> str:
    how = "lossless" if lossless else f"step index {step_index}"
    return f"{tokens} tokens from {start} on in {dtype}, {how}"
