"""`Codec`: chunks to blobs and back.

    encode, encode_paged   chunk, cache --EncodeRequest--> Backend --sections--> container --> blobs
    open                   blob --header, tag, profile--> OpenBlob
    decode, decode_…       OpenBlob --DecodeRequest--> Backend --> cache

A dense chunk is a `PagedCache` of one block, so all caches on all devices take the same path.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from cuvee.codec.backends import (
    Backend,
    Coding,
    DecodeRequest,
    EncodeRequest,
    check_backend,
    get_backend,
    has_backend,
)
from cuvee.codec.chunk import KVChunk, check_following
from cuvee.codec.entropy.family import OCTAVE
from cuvee.codec.entropy.residuals import FINER, MAX_REFINEMENTS
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, MIN_STREAM_BYTES
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, ProfileMismatchError, allocations
from cuvee.codec.format.container import (
    NO_DIGEST,
    Contents,
    Header,
    Kind,
    Scheme,
    header_digest,
    plain_bytes,
    read_header,
    read_sections,
    read_token_ids,
    verify_tag,
    write_blob,
    write_token_ids,
)
from cuvee.codec.format.keys import make_keys
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL, one_request
from cuvee.codec.profiles.recognition import IdCheck, Recognizer
from cuvee.codec.stages.implementations import stage_names
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.lazy import lazy
from cuvee.codec.token_ids import NO_TOKEN, as_token_ids

_log = logging.getLogger(__name__)

# As long as the contexts of most models. Without a limit, a blob of a hundred kilobytes may claim 2^24 tokens, which
# are gigabytes of cache.
MAX_DECODED_TOKENS = 1 << 17
LAST_POSITION = (1 << 32) - 1  # the last one that a blob can store
CHECK_IDS_EVERY = 64  # calls with token ids between those whose ids are compared with the cache


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """A blob whose header and tag were verified by a codec: see `Codec.open`.

    Attributes:
        blob: its bytes.
        header: the parsed header.
        layout: of the chunk, with the dtype that its values had.
        opened_by: identity of the codec that verified the blob; other codecs refuse it.
        refinements: bytes and header of each refinement that is decoded with a base.
    """

    blob: bytes | memoryview
    header: Header
    layout: KVLayout
    opened_by: object
    refinements: tuple[tuple[bytes | memoryview, Header], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.header.tokens

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.header.start

    @property
    def dtype(self) -> str:
        """Name of the dtype that the values had."""
        return self.header.dtype


@dataclass(frozen=True, slots=True)
class ExpectedPart:
    """What to expect of a chunk that is decoded from its parts up to one of them, by the profile's curve.

    Attributes:
        kl: nats per token; None if the curve does not measure it.
        bits: bits per value of these parts together; None outside the curve.
    """

    kl: float | None
    bits: float | None


@dataclass(frozen=True, slots=True)
class _Setting:
    """How chunks are coded: the scheme, the step index of the base, 0 without loss, and the number of refinements."""

    scheme: Scheme
    step_index: int
    refinements: int = 0

    @property
    def name(self) -> str:
        return LOSSLESS if self.scheme is Scheme.LOSSLESS else f"step:{self.step_index}"


class Codec:
    """Compresses chunks with one profile at one quality. Immutable and safe to share between threads.

    Args:
        profile: a profile learned for the model, or `Profile.unlearned(layout)`, which is lossless.
        quality: `"lossless"`, `"high"`, `"balanced"` or `"small"`. Default: `"balanced"`, but `"lossless"` with an
            unlearned profile, which takes no other. A preset stands for a KL on the worst kind of text: 0.001,
            0.005 and 0.02. With a profile without a curve it promises none, and a warning says so. Instead of a
            quality, exactly one of these:
        kl: the most nats per token by which the model's predictions may move, on average over the kinds of text that
            the profile was measured on;
        bits: bits per value, all bytes counted;
        ratio: the ratio of uncompressed to compressed size, for caches of `dtype`. Both sizes are those to expect of
            texts like those of the profile's curve, in chunks of 256 tokens. No single chunk is held to them: a chunk
            of 44 tokens takes up to a third more;
        step: the quantizer step, in the profile's units.
            For all but `step`, the codec takes the best step that keeps the request on the profile's curve. If every
            step of the curve does, that is an end of the curve. If no step keeps a KL, the codec is lossless. If no
            step keeps a size, an error names the range. If the profile predicts from tokens, chunks without token ids
            have a curve of their own, from which they get the step that keeps a KL. Sizes and steps are those of
            chunks with ids; at the same step, chunks without ids are larger.
        kind: with kl= or a preset: the kind of text (`profile.curves`) whose curve decides.
        worst: with kl=: the worst kind of text decides, as it does for presets. Kinds differ by a factor of three, and
            neither the mean nor the worst kind is a limit for single sequences.
        dtype: with ratio=: dtype of the caches, `"float32"` for example; by default a value counts as 16 bits, whatever
            the profile was learned in. The codec takes chunks of every dtype either way.
        backend: `"auto"` (by the tensors' device), `"numba"` or `"reference"` on the CPU, `"triton"` on a GPU.
        threads: sections coded at the same time, in chunks of a million values or more. Default: the number of CPUs.
        refinements: 1 to encode with `encode_parts` a base and a refinement, each a blob of its own. The quality is
            that of both together, which take a few percent more bytes than one blob of it; the base alone has four
            times the quantizer step, and about twelve times the KL. Needs a learned profile. Default: 0.
        key: 16 to 64 secret bytes; blobs then carry an authentication tag, and only blobs with a valid tag decode. Or
            several secrets: the first writes the tag, and a tag of any is accepted. `associated_data=` binds a blob to
            its place. Such a codec cannot be pickled, because the bytes would hold the secret.

    Raises:
        InputError: an argument out of range, or several qualities at once; `profile` is not a `Profile`, or has learned
            nothing and is not to be lossless.
        ProfileError: no step of the profile's curve is small enough, or the curve was not measured.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout)
        >>> codec = Codec(Profile.unlearned(layout), "lossless")
        >>> back = codec.decode(codec.encode(chunk))
        >>> torch.equal(back.keys[2], chunk.keys[2])
        True
    """

    def __init__(
        self,
        profile: Profile,
        quality: str | None = None,
        *,
        kl: float | None = None,
        bits: float | None = None,
        ratio: float | None = None,
        step: float | None = None,
        kind: str | None = None,
        worst: bool = False,
        dtype: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        refinements: int = 0,
        key: bytes | Sequence[bytes] | None = None,
    ) -> None:
        _check_profile(profile)
        _check_refinements(refinements, profile)
        if threads is not None and threads < 1:
            raise InputError(f"threads: must be at least 1, got {threads}")
        if (quality, kl, bits, ratio, step) == (None,) * 5:
            quality = profile.default_quality
        request = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
        name, value = one_request(**request, kind=kind, worst=worst)
        self._request = f"{name}={value}"
        self.profile = profile
        self._setting = _choose_setting(profile, request, kind, worst, dtype, plain=False)
        if quality in PRESET_KL and not profile.promises_kl:
            _warn_of_no_promise(quality, profile.source)
        self.lossless = self._setting.scheme is Scheme.LOSSLESS
        self.step_index = self._setting.step_index
        self._plain_setting = self._setting
        if not self.lossless and profile.plain_curve and name in ("quality", "kl"):
            self._plain_setting = _choose_setting(profile, request, kind, worst, dtype, plain=True)
        self.refinements = refinements
        if refinements:
            if self.lossless:
                raise InputError(
                    f"refinements: must be 0 without loss, got {refinements}, and a quality that is lossless with this "
                    "profile"
                )
            self._setting = _in_parts(self._setting, refinements)
            self._plain_setting = _in_parts(self._plain_setting, refinements)
            self.step_index = self._setting.step_index
        self.threads = threads or os.cpu_count() or 1
        self._backend_name = check_backend(backend)
        self._identity = object()  # `OpenBlob`s hold it, to say which codec verified them
        self._keys = make_keys(key)
        self._layouts: dict[str, KVLayout] = {}
        self._backends: dict[str, Backend] = {}
        self._calls_with_ids = 0
        on_host = backend if backend in stage_names() else "auto"
        host = get_backend(on_host, "cpu", self.threads)
        # A step beyond the plan fails here, not later.
        host.prepare(self._coding_of(profile.layout.dtype, profile.token_table is not None))
        if backend in ("auto", host.name):
            self._backends["cpu"] = host

    def __repr__(self) -> str:
        key = ", with a key" if self._keys else ""
        how = f"backend {self._backend_name!r}, {self.threads} threads{key}"
        return f"Codec({self.described_quality}; {how}; {self.profile!r})"

    @property
    def described_quality(self) -> str:
        """The quality for people: what was asked for, and `quality_name`."""
        return self._request if self._request.endswith(LOSSLESS) else f"{self._request}, {self.quality_name}"

    @classmethod
    def without_profile(
        cls,
        model: object,
        *,
        backend: str = "auto",
        threads: int | None = None,
        key: bytes | Sequence[bytes] | None = None,
    ) -> Codec:
        """Make a lossless codec, which needs no profile.

        Args:
            model: the model of the caches: a transformers model, its configuration, or a `KVLayout`.
            backend: see `Codec`.
            threads: see `Codec`.
            key: see `Codec`.

        Raises:
            InputError: `model` is none of these; an argument out of range.
            UnsupportedModelError: a model whose cache cuvee does not support.

        Example:
            >>> from cuvee import Codec
            >>> from transformers import LlamaConfig
            >>> Codec.without_profile(LlamaConfig(num_hidden_layers=2, dtype="bfloat16")).lossless
            True
        """
        return cls(Profile.unlearned(KVLayout.of(model)), LOSSLESS, backend=backend, threads=threads, key=key)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the backends and what is lazy, which are made anew where the codec is unpickled."""
        kept = {name: own for name, own in self.__dict__.items() if name not in ("recognizer", "_id_check")}
        return kept | {"_backends": {}}

    @lazy
    def recognizer(self) -> Recognizer | None:
        """Recognizes ids and positions of tokens whose engine tells none; None without loss, which needs neither.

        The first use takes a fraction of a second, or a few seconds
        with the vocabulary of a large model.
        """
        return None if self.lossless else Recognizer(self.profile)

    @lazy
    def _id_check(self) -> IdCheck:
        return IdCheck(self.profile)

    @property
    def quality_name(self) -> str:
        """The quality as it stands in the keys of a store: equal names of one profile mean equal blobs.

        `"lossless"`, or `"step:<index>"`, followed by `",plain:<index>"` or `",plain:lossless"` if chunks without token
        ids are coded in another way, and by `",parts:2"` if chunks are encoded as a base and a refinement.
        """
        parts = f",parts:{self.refinements + 1}" if self.refinements else ""
        if self._plain_setting == self._setting or self.profile.token_table is None:
            return self._setting.name + parts
        return f"{self._setting.name},plain:{self._plain_setting.name.removeprefix('step:')}{parts}"

    def part_count(self, ids: bool) -> int:
        """Return how many parts chunks have, with or without token ids: without loss, there is only one."""
        setting = self._setting if ids or self.profile.token_table is None else self._plain_setting
        return 1 + setting.refinements

    def expected_parts(self, worst: bool = False) -> tuple[ExpectedPart, ...]:
        """Return what to expect of chunks with token ids from their base, and from the base with its refinement.

        Args:
            worst: the KL is that of the worst kind of text, not the mean.

        Returns:
            one entry per part; one entry, without loss, for a codec that is lossless.

        Example:
            >>> from cuvee import Codec, KVLayout, LayerLayout, Profile
            >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
            >>> Codec(Profile.unlearned(layout), "lossless").expected_parts()
            (ExpectedPart(kl=0.0, bits=None),)
        """
        if self.lossless:
            return (ExpectedPart(0.0, None),)
        steps = [self.step_index - FINER * part for part in range(self.refinements + 1)]
        return tuple(ExpectedPart(self.profile.kl_at(step, worst), self.profile.bits_at(step)) for step in steps)

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """8 bytes that identify each key without revealing it, the writing key first; empty without `key=`."""
        return tuple(key.id for key in self._keys)

    def encode(self, chunk: KVChunk, *, tokens: object = None, associated_data: bytes = b"") -> bytes:
        """Compress a chunk into one blob, on the device where the chunk is.

        Args:
            chunk: the chunk to compress. With a calibrated profile, the tokens at the end of a cache are coded finer.
                Slices of one chunk know how far from the end they are (`KVChunk.following`).
            tokens: ids of the chunk's tokens, `[T]` integers, `cuvee.NO_TOKEN` for a token without one. If all tokens
                have ids, a profile with a token table makes the blob smaller, and the blob holds them, so that
                decoding needs nothing new. Any other profile, and lossless coding, ignores them. Default:
                `chunk.token_ids`.
            associated_data: with a key, bytes that the blob is bound to, such as the name under which a store keeps it.
                The blob does not contain these bytes, and decodes only if the same bytes are given.

        Raises:
            ProfileMismatchError: the chunk's layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite); token ids of another number, or outside
                the vocabulary; `associated_data` without a key; a codec with refinements.
        """
        self._check_whole()
        return self._encode_chunk(chunk, tokens, associated_data)[0]

    def encode_parts(self, chunk: KVChunk, *, tokens: object = None, associated_data: bytes = b"") -> tuple[bytes, ...]:
        """Compress a chunk into a base and a refinement, each a blob of its own. Needs a codec with `refinements=1`.

        The base decodes alone, and with its refinement at the codec's quality, so whoever keeps or sends the parts can
        leave out the second. A refinement fits only the base that it was made with. A chunk without token ids that is
        coded without loss (`quality_name`) is one part.

        Args:
            chunk: see `encode`.
            tokens: see `encode`.
            associated_data: see `encode`; all parts are bound to it.

        Raises:
            as `encode`; InputError for a codec without refinements.

        Example:
            >>> import torch
            >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, fit
            >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 2, "float32", max_positions=None)
            >>> chunks = [KVChunk(torch.randn(2, 64, 2, 8), torch.randn(2, 64, 2, 8), layout) for _ in range(8)]
            >>> codec = Codec(fit(layout, chunks), "high", refinements=1)
            >>> base, refinement = codec.encode_parts(chunks[0])
            >>> coarse, fine = (codec.decode(base, refinements=own) for own in ([], [refinement]))
            >>> coarse_error, fine_error = ((own.keys[0] - chunks[0].keys[0]).abs().mean() for own in (coarse, fine))
            >>> bool(fine_error < coarse_error / 2)
            True
        """
        self._check_parts()
        return tuple(self._encode_chunk(chunk, tokens, associated_data))

    def _encode_chunk(self, chunk: KVChunk, tokens: object, associated_data: bytes) -> list[bytes]:
        """Return the parts of a chunk."""
        self.profile.check_layout(chunk.layout)
        self._check_associated(associated_data)
        start = self._check_start(chunk.start, chunk.tokens)
        cache = PagedCache.of_chunk(chunk)
        ids = self._token_ids(chunk.token_ids if tokens is None else tokens, chunk.tokens)
        request = EncodeRequest(cache, None, chunk.tokens, start, ids, chunk.following)
        return self._encode(cache, [request], [associated_data])[0]

    def _check_parts(self) -> None:
        if not self.refinements:
            raise InputError(
                "refinements: must be 1 in a codec that encodes parts, got 0: make the Codec with refinements=1, or "
                "call encode() or encode_paged()"
            )

    def _check_whole(self) -> None:
        if self.refinements:
            raise InputError(
                f"refinements: must be 0 in a codec that encodes single blobs, got {self.refinements}: call "
                "encode_parts() or encode_parts_paged()"
            )

    def decode(
        self,
        blob: bytes | memoryview | OpenBlob,
        start: int | None = None,
        *,
        tokens: range | None = None,
        out: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        device: torch.device | str = "cpu",
        refinements: Sequence[bytes | memoryview] = (),
        associated_data: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> KVChunk:
        """Restore a chunk. The blob may have been encoded at any quality of this codec's profile.

        Args:
            blob: the result of `encode`, or of `open`.
            start: position of the first restored token; None keeps the position at which it was encoded.
            tokens: restore only these tokens of the chunk, a range without gaps. Default: all.
            out: keys and values to decode into, `[T, H, D]` per layer with any strides, in the blob's dtype. The
                chunk that is returned holds these tensors. After an error their contents are undefined. Default: new
                tensors.
            device: where the chunk is restored; with `out`, that is the device of its tensors.
            refinements: of a base, none, or the one that `encode_parts` returned with it. For an `OpenBlob`, `open`
                takes it.
            associated_data: the bytes that the blob was bound to when it was encoded; for an `OpenBlob`, `open` takes
                them.
            max_tokens: refuse to restore more, because a small blob may claim a huge cache. For blobs from others,
                give the number that you expect: the default, 131072, is 17 GB for a model of 8 B parameters. None: no
                limit.

        Raises:
            FormatError, VersionError, CorruptError: bytes that are not a whole, undamaged blob; with a key, bytes that
                were changed or are bound to other associated data.
            KeyMismatchError: a tag of another key, a tag and no key, or a key and no tag.
            ProfileMismatchError: a blob of another profile or model.
            InputError: a target position the model does not have, or tokens outside the chunk; more than `max_tokens`;
                `associated_data` without a key; `out` of another shape or dtype.
            OutOfMemoryError: the tensors cannot be allocated.
        """
        opened = self._opened(blob, associated_data, refinements)
        span = range(opened.tokens) if tokens is None else _within("tokens", tokens, opened.tokens, "of the blob")
        target = None if out is None else _dense_output(opened.layout, out, len(span))
        return self._restore(opened, span, start, torch.device(device), max_tokens, target)

    def on_device(self, device: torch.device | str) -> bool:
        """Return whether `encode_paged` and `decode_paged` code caches on `device` there, many chunks in one call.

        If not, code a copy on the CPU.

        Raises:
            InputError: the codec's backend cannot run here, or does not serve that device.
        """
        kind = torch.device(device).type
        return has_backend(self._backend_name, kind) and self._backend(kind).batched

    def open(
        self,
        blob: bytes | memoryview,
        *,
        refinements: Sequence[bytes | memoryview] = (),
        associated_data: bytes = b"",
    ) -> OpenBlob:
        """Verify a blob once: its header, its tag, its profile and its model. Sections are verified when decoded.

        Every method that decodes takes the result in place of the bytes, and does not verify them again.

        Args:
            blob: the result of `encode`, or the base of `encode_parts`. Later changes of these bytes go unnoticed.
            refinements: see `decode`.
            associated_data: the bytes that the blob was bound to when it was encoded.

        Raises:
            FormatError, VersionError, CorruptError, KeyMismatchError, ProfileMismatchError: as `decode`. CorruptError
                also for a refinement of another blob.
            InputError: `associated_data` without a key; `blob` is not bytes; more than one refinement, or one of a blob
                that is no base.

        Example:
            >>> import torch
            >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile
            >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
            >>> chunk = KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout)
            >>> codec = Codec(Profile.unlearned(layout), "lossless", key=bytes(range(16)))
            >>> opened = codec.open(codec.encode(chunk, associated_data=b"chunk 7"), associated_data=b"chunk 7")
            >>> opened.tokens, codec.decode(opened, tokens=range(10, 20)).tokens
            (64, 10)
        """
        self._check_associated(associated_data)
        blob = plain_bytes(blob)
        header = read_header(blob)
        verify_tag(blob, header, self._keys, associated_data)
        layout = self._check_header(header)
        return OpenBlob(
            blob, header, layout, self._identity, self._open_refinements(blob, header, refinements, associated_data)
        )

    def _open_refinements(
        self,
        blob: bytes | memoryview,
        header: Header,
        refinements: Sequence[bytes | memoryview],
        associated_data: bytes,
    ) -> tuple[tuple[bytes | memoryview, Header], ...]:
        """Verify a refinement against its base."""
        if len(refinements) > (most := 0 if header.lossless else MAX_REFINEMENTS):
            raise InputError(f"refinements: must be at most {most} of this blob, got {len(refinements)}")
        found = []
        for given in refinements:
            finer = plain_bytes(given)
            own = read_header(finer)
            verify_tag(finer, own, self._keys, associated_data)
            if own.kind is not Kind.REFINEMENT or own.refines != header_digest(blob):
                raise CorruptError("refinement: must be of this base, got one of another")
            shape = (own.dtype, own.tokens, own.start, own.values_per_token, own.layout, own.profile, own.schemes)
            expected = (
                header.dtype, header.tokens, header.start, header.values_per_token, header.layout, header.profile,
                header.schemes,
            )  # fmt: skip
            if shape != expected or own.step_index != header.step_index - FINER:
                raise FormatError(
                    "refinement: must have the tokens, layout and profile of its base, at a quarter of the step"
                )
            found.append((finer, own))
        return tuple(found)

    def open_expected(
        self,
        blob: bytes | memoryview,
        *,
        tokens: int,
        start: int | None,
        dtype: str,
        refinements: Sequence[bytes | memoryview] = (),
        associated_data: bytes = b"",
    ) -> OpenBlob:
        """Open a blob of this codec's quality that holds `tokens` tokens from `start` on.

        `open` takes any quality of its profile. A blob that came from a store by its key must also have the quality
        that the key stands for.

        Args:
            blob: the bytes from the store.
            tokens: number of tokens that the blob must hold.
            start: position that the first token must have; None: any.
            dtype: dtype that the values must have had.
            refinements: as in `open`.
            associated_data: as in `open`.

        Raises:
            CorruptError: the blob holds other tokens, or was coded by another scheme or at another step.
            FormatError, VersionError, KeyMismatchError, ProfileMismatchError: as `decode`.
        """
        self._check_associated(associated_data)
        blob = plain_bytes(blob)
        header = read_header(blob)
        layout = self._check_header(header)
        found = (header.tokens, header.start, header.dtype, header.schemes[0], header.step_index)
        setting = self._setting_for(header.token_id_bytes > 0)
        first = header.start if start is None else start
        wanted = (tokens, first, dtype, setting.scheme, setting.step_index)
        if found != wanted:
            raise CorruptError(f"blob: must hold {_described(*wanted)}, got {_described(*found)}")
        verify_tag(blob, header, self._keys, associated_data)
        return OpenBlob(
            blob, header, layout, self._identity, self._open_refinements(blob, header, refinements, associated_data)
        )

    @property
    def layer_runs(self) -> tuple[range, ...]:
        """The runs of layers that cost least to restore one after the other, in order; together all layers.

        Layers that were coded together are one run.
        """
        if self._setting.scheme is Scheme.TRANSFORM:
            return tuple(range(section.first_layer, section.end_layer) for section in self.profile.sections)
        return tuple(range(layer, layer + 1) for layer in range(self.profile.layout.num_layers))

    def verify(self, opened: OpenBlob) -> None:
        """Verify the checksums of all sections, which decoding does section by section.

        For who may not fail halfway. Only streams whose checksum is right and that were never made by `encode` are
        then still refused when they are decoded.

        Args:
            opened: of `open` or `open_expected`.

        Raises:
            CorruptError, FormatError: the bytes are damaged.
        """
        self._stored_ids(opened)
        self._coding(opened)
        for blob, header in ((opened.blob, opened.header), *opened.refinements):
            read_sections(blob, header, range(len(header.section_bytes)))

    def encode_paged(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        *,
        tokens: Sequence[object] | None = None,
        following: Sequence[int] | None = None,
        associated_data: Sequence[bytes] | None = None,
    ) -> list[bytes]:
        """Compress chunks straight out of a serving engine's cache, in one call.

        Args:
            cache: holds the tokens.
            slots: for each chunk, int64 `[T]` on the cache's device: the slots of its tokens, in order.
            starts: for each chunk, the position of its first token.
            tokens: for each chunk, the ids of its tokens as in `encode`, or None; default: no chunk has ids.
            following: for each chunk, the number of tokens after it, as in `KVChunk`; default: 0.
            associated_data: for each chunk, as in `encode`.

        Returns:
            one blob per chunk. Its values have the dtype `cache.layout.dtype`, whatever the cache stores.

        Raises:
            as `encode`; InputError for slots that the cache does not have.
        """
        self._check_whole()
        requests = self._paged_requests(cache, slots, starts, tokens, following)
        bound = self._each_associated(associated_data, len(slots))
        return [blob for (blob,) in self._encode(cache, requests, bound)]

    def encode_parts_paged(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        *,
        tokens: Sequence[object] | None = None,
        following: Sequence[int] | None = None,
        associated_data: Sequence[bytes] | None = None,
    ) -> list[tuple[bytes, ...]]:
        """Compress chunks straight out of a serving engine's cache into bases and their refinements, in one call.

        Args:
            cache: see `encode_paged`.
            slots: see `encode_paged`.
            starts: see `encode_paged`.
            tokens: see `encode_paged`.
            following: see `encode_paged`.
            associated_data: see `encode_paged`; all parts of a chunk are bound to it.

        Returns:
            the parts of each chunk, as `encode_parts` returns them.

        Raises:
            as `encode_paged`; InputError for a codec without refinements.
        """
        self._check_parts()
        requests = self._paged_requests(cache, slots, starts, tokens, following)
        return [
            tuple(parts) for parts in self._encode(cache, requests, self._each_associated(associated_data, len(slots)))
        ]

    def _paged_requests(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        tokens: Sequence[object] | None,
        following: Sequence[int] | None,
    ) -> list[EncodeRequest]:
        """Check the arguments of `encode_paged`."""
        self.profile.check_layout(cache.layout)
        if len(slots) != len(starts):
            raise InputError(f"starts: must be one for each of the {len(slots)} chunks in slots, got {len(starts)}")
        ids = _each("tokens", tokens, len(slots))
        after = _each("following", [0] * len(slots) if following is None else following, len(slots))
        requests = []
        for at, given, own_ids, own_after in zip(slots, starts, ids, after, strict=True):
            count = len(cache.check_slots(at))
            if not count:
                raise InputError("slots: must name at least one token per chunk, got none")
            start = self._check_start(given, count)
            token_ids = self._token_ids(own_ids, count)
            requests.append(EncodeRequest(cache, at, count, start, token_ids, check_following(own_after)))
        return requests

    def decode_paged(
        self,
        blobs: Sequence[bytes | memoryview | OpenBlob],
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int] | None = None,
        layers: range | None = None,
        *,
        associated_data: Sequence[bytes] | None = None,
    ) -> PendingDecode:
        """Restore chunks straight into a serving engine's cache, in one call.

        On a device this only starts the work, on the current stream: call `check()` of the result before you rely on
        the contents of those slots. After a failure their contents are undefined.

        Args:
            blobs: results of `encode`, `encode_paged` or `open`, of any quality of this profile.
            cache: receives the tokens.
            slots: for each blob, int64 `[T]` on the cache's device; -1 leaves a token out. A blob must hold exactly T
                tokens.
            starts: for each blob, the position that its first token gets; default: the one at which it was encoded.
            layers: restore only these layers, and read only their sections; default all.
            associated_data: for each blob, as in `decode`.

        Raises:
            as `decode`: at once for errors in headers and checksums, from `check()` for damaged streams.
        """
        self.profile.check_layout(cache.layout)
        layers = self._check_layers(range(cache.layout.num_layers) if layers is None else layers)
        if len(slots) != len(blobs) or (starts is not None and len(starts) != len(blobs)):
            raise InputError(
                f"slots, starts: must be one for each of the {len(blobs)} blobs, got {len(slots)} slots and "
                f"{'no' if starts is None else len(starts)} starts"
            )
        bound = self._each_associated(associated_data, len(blobs))
        work: dict[Coding, list[DecodeRequest]] = defaultdict(list)
        for number, (blob, at, to) in enumerate(zip(blobs, slots, bound, strict=True)):
            opened = self._opened(blob, to)
            cache.check_slots(at, opened.tokens)
            kept = opened.start
            start = self._check_move(opened, kept, kept if starts is None else starts[number], opened.tokens)
            request = DecodeRequest(
                opened.blob, opened.header, opened.layout, range(opened.tokens), layers, cache, at, start, number,
                self._stored_ids(opened), opened.refinements,
            )  # fmt: skip
            work[self._coding(opened)].append(request)
        backend = self._backend(cache.device.type)
        with allocations(f"decoding {sum(map(len, slots))} tokens"):
            return PendingDecode(tuple(backend.decode(coding, requests) for coding, requests in work.items()))

    def _encode(
        self, cache: PagedCache, requests: Sequence[EncodeRequest], bound: Sequence[bytes]
    ) -> list[list[bytes]]:
        """Return the parts of chunks of a cache, each bound to its associated data."""
        layout, backend = cache.layout, self._backend(cache.device.type)
        chunks: list[list[bytes]] = [[]] * len(requests)
        for predicted in (False, True):
            own = [i for i, request in enumerate(requests) if (request.token_ids is not None) == predicted]
            coding = self._coding_of(layout.dtype, predicted)
            coded = backend.encode(coding, [requests[i] for i in own]) if own else []
            if predicted and own:
                self._check_ids(requests[own[0]])
            for i, sections in zip(own, coded, strict=True):
                chunks[i] = sections
        return [
            self._write(layout, request, sections, to)
            for request, sections, to in zip(requests, chunks, bound, strict=True)
        ]

    def _write(
        self, layout: KVLayout, request: EncodeRequest, sections: Sequence[bytes], associated_data: bytes
    ) -> list[bytes]:
        """Write the sections of all parts of a chunk to blobs."""
        setting = self._setting_for(request.token_ids is not None)
        parts = 1 + setting.refinements
        count = len(sections) // parts
        contents = Contents(
            dtype=layout.dtype, tokens=request.tokens, start=request.start, values_per_token=layout.values_per_token,
            step_index=setting.step_index, schemes=(setting.scheme,) * count, layout=layout.fingerprint,
            profile=NO_DIGEST if setting.scheme is Scheme.LOSSLESS else self.profile.id,
        )  # fmt: skip
        token_ids, key = self._ids_to_store(request.token_ids), self._keys[0] if self._keys else None
        blobs = [write_blob(contents, sections[:count], token_ids=token_ids, key=key, associated_data=associated_data)]
        if setting.refinements:
            finer = replace(
                contents, kind=Kind.REFINEMENT, step_index=setting.step_index - FINER, refines=header_digest(blobs[0])
            )
            blobs.append(write_blob(finer, sections[count:], key=key, associated_data=associated_data))
        return blobs

    def _restore(
        self,
        opened: OpenBlob,
        span: range,
        start: int | None,
        device: torch.device,
        max_tokens: int | None,
        target: PagedCache | None,
    ) -> KVChunk:
        """Decode the tokens `span` into `target`, by default into new tensors."""
        check_tokens(len(span), max_tokens)
        kept = opened.start + span.start
        start = self._check_move(opened, kept, kept if start is None else start, len(span))
        coding, layers = self._coding(opened), range(self.profile.layout.num_layers)
        backend = self._backend(device.type if target is None else target.device.type)
        with allocations(f"decoding {len(span)} tokens"):
            cache = target or PagedCache.empty(opened.layout, len(span), layers, device)
            ids = self._stored_ids(opened)
            request = DecodeRequest(
                opened.blob, opened.header, opened.layout, span, layers, cache, None, start, token_ids=ids,
                refinements=opened.refinements,
            )  # fmt: skip
            backend.decode(coding, [request])()
        return cache.chunk(None, start, None if ids is None else ids[span.start : span.stop])

    def _token_ids(self, given: object, tokens: int) -> I64 | None:
        """Return checked ids; None if a token has none, or if nothing is predicted from them."""
        table = None if self.lossless else self.profile.token_table
        ids = None if given is None else as_token_ids(given, tokens)
        if table is None:
            return None
        if ids is None or ids.min() == NO_TOKEN:
            _warn_of_no_ids(bool(self.profile.plain_curve))
            return None
        if ids.max() >= table.vocabulary:
            raise InputError(
                f"tokens: must be below {table.vocabulary}, the vocabulary of the profile's model, got {ids.max()}"
            )
        return ids

    def _check_ids(self, request: EncodeRequest) -> None:
        """Say once if ids are not those of the cache. They cost bytes, and nothing else.

        Whoever passes wrong ids does so again and again, and a device has to be waited for, so few calls are checked.
        """
        checked = self._calls_with_ids % CHECK_IDS_EVERY == 0
        self._calls_with_ids += 1
        ids = request.token_ids
        if checked and ids is not None and not self._id_check.agrees(request.cache, request.every_slot, ids):
            _warn_of_other_ids()

    def _ids_to_store(self, token_ids: I64 | None) -> bytes:
        table = self.profile.token_table
        return b"" if token_ids is None or table is None else write_token_ids(token_ids, table.vocabulary)

    def _stored_ids(self, opened: OpenBlob) -> I64 | None:
        table = self.profile.token_table
        if table is None:
            if opened.header.token_id_bytes:
                raise FormatError("header: must list no token ids, which the profile has no table for")
            return None
        return read_token_ids(opened.blob, opened.header, table.vocabulary)

    def _backend(self, device_type: str) -> Backend:
        if device_type not in self._backends:
            self._backends[device_type] = get_backend(self._backend_name, device_type, self.threads)
        return self._backends[device_type]

    def _coding_of(self, dtype: str, predicted: bool) -> Coding:
        setting = self._setting_for(predicted)
        lossless = setting.scheme is Scheme.LOSSLESS
        predicted = predicted and not lossless
        return Coding(self.profile, setting.scheme, setting.step_index, dtype, predicted, setting.refinements)

    def _setting_for(self, predicted: bool) -> _Setting:
        """Return how chunks are coded, by whether they are predicted from token ids."""
        return self._setting if predicted or self.profile.token_table is None else self._plain_setting

    def _opened(
        self,
        blob: bytes | memoryview | OpenBlob,
        associated_data: bytes,
        refinements: Sequence[bytes | memoryview] = (),
    ) -> OpenBlob:
        if not isinstance(blob, OpenBlob):
            return self.open(blob, refinements=refinements, associated_data=associated_data)
        if refinements:
            raise InputError(
                f"refinements: must be empty for an OpenBlob, got {len(refinements)}: pass them to open(), which "
                "verifies them"
            )
        if blob.opened_by is not self._identity:
            raise InputError(
                "blob: must be opened by this codec, got an OpenBlob of another, which may have other keys: call open()"
            )
        if associated_data:
            raise InputError(
                "associated_data: must be empty for an OpenBlob, got bytes: pass it to open(), which verifies it"
            )
        return blob

    def _coding(self, opened: OpenBlob) -> Coding:
        header = opened.header
        if header.lossless:
            return Coding(self.profile, Scheme.LOSSLESS, 0, header.dtype)
        if not self.profile.learned:
            raise FormatError("header: must be lossless for an unlearned profile, got a transform blob")
        refinements = len(opened.refinements)
        self.profile.check_step_index(header.step_index - FINER * refinements)
        predicted = header.token_id_bytes > 0
        return Coding(self.profile, Scheme.TRANSFORM, header.step_index, header.dtype, predicted, refinements)

    def _check_layers(self, layers: range) -> range:
        return _within("layers", layers, self.profile.layout.num_layers, "of the model")

    def _check_start(self, start: object, tokens: int) -> int:
        if type(start) is not int or not 0 <= start <= LAST_POSITION - tokens:
            raise InputError(f"start: must be an int of at least 0 and below 2**32 - {tokens}, got {start!r}")
        self.profile.layout.check_positions(start, tokens)
        return start

    def _check_move(self, opened: OpenBlob, kept: int, start: int, tokens: int) -> int:
        """Return `start` if tokens that were encoded at position `kept` can move there."""
        if self._check_start(start, tokens) != kept and not opened.layout.relocatable:
            raise InputError(
                f"start: must be {kept}, where the tokens were encoded, got {start}: {opened.layout.model_type} has no "
                "RoPE, so its cache cannot move"
            )
        return start

    def _check_associated(self, associated_data: object) -> None:
        if not isinstance(associated_data, bytes):
            raise InputError(f"associated_data: must be bytes, got {type(associated_data).__name__}")
        if associated_data and not self._keys:
            raise InputError(
                f"associated_data: must be empty without a key, got {len(associated_data)} bytes: make the Codec with "
                "key=, whose tag binds a blob"
            )

    def _each_associated(self, associated_data: Sequence[bytes] | None, count: int) -> Sequence[bytes]:
        if associated_data is None:
            return [b""] * count
        if len(associated_data) != count:
            raise InputError(f"associated_data: must be one for each of the {count} chunks, got {len(associated_data)}")
        for own in associated_data:
            self._check_associated(own)
        return associated_data

    def _check_header(self, header: Header) -> KVLayout:
        if header.kind is Kind.REFINEMENT:
            raise FormatError(
                "blob: is a refinement, which decodes only with its base: pass it as refinements= of the base"
            )
        layout = self._layout(header.dtype)
        if header.layout != layout.fingerprint:
            raise ProfileMismatchError("blob: must hold a cache of the profile's model, got one of another model")
        if not header.lossless and header.profile != self.profile.id:
            raise ProfileMismatchError(
                f"blob: must be of profile {self.profile.id.hex()}, got profile {header.profile.hex()}"
            )
        sections = layout.num_layers if header.lossless else len(self.profile.sections)
        if len(header.section_bytes) != sections or header.values_per_token != layout.values_per_token:
            raise FormatError(f"header: must list {sections} sections, got {len(header.section_bytes)}")
        # The size of a section bounds its streams, and so the tokens and the memory that a header may claim.
        if min(header.section_bytes) * MAX_TOKENS_PER_STREAM < MIN_STREAM_BYTES * header.tokens:
            raise FormatError(
                f"header: must list sections that hold {header.tokens} tokens, got {min(header.section_bytes)} bytes"
            )
        return layout

    def _layout(self, dtype: str) -> KVLayout:
        if dtype not in self._layouts:
            self._layouts[dtype] = replace(self.profile.layout, dtype=dtype)
        return self._layouts[dtype]


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Decoding that was started. `check` waits for it, and tells whether the streams were whole.

    Any thread may call `check`, on any stream. When it returns or raises, nothing more is written to the cache.
    """

    _waiting: tuple[Callable[[], None], ...]

    def check(self) -> None:
        """Wait for the device.

        Raises:
            CorruptError: a stream was damaged.
            InputError: a slot that the cache does not have.
        """
        problem: CuveeError | None = None
        with allocations("decoding"):
            for wait in self._waiting:
                try:
                    wait()
                except CuveeError as error:  # later work still writes to the cache: wait for all
                    problem = problem or error
        if problem is not None:
            raise problem


def _dense_output(
    layout: KVLayout, out: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]], tokens: int
) -> PagedCache:
    """Return the tensors of `decode(out=)` as a dense cache, if they can hold these tokens."""
    keys, values = out
    cache = PagedCache.dense(layout, keys, values)
    if cache.dtype != layout.torch_dtype:
        raise InputError(f"out: must be {layout.torch_dtype} like the blob's values, got {cache.dtype}")
    if lengths := sorted({len(tensor) for tensor in (*keys, *values)} - {tokens}):
        raise InputError(f"out: must hold {tokens} tokens in every layer, got {lengths[0]}")
    return cache


def _each(name: str, given: Sequence[object] | None, count: int) -> list[object]:
    """Return what a caller gave for each of `count` chunks: as many times None if nothing was given."""
    each: list[object] = [None] * count if given is None else list(given)
    if len(each) != count:
        raise InputError(f"{name}: must be one for each of the {count} chunks, got {len(each)}")
    return each


def _within(name: str, wanted: object, count: int, of: str) -> range:
    """Return `wanted` if it is a range without gaps, not empty, and within `count`; raise InputError otherwise."""
    if not isinstance(wanted, range):
        raise InputError(f"{name}: must be a range, such as range(0, {count}), got {wanted!r}")
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= count:
        raise InputError(f"{name}: must lie within the {count} {name} {of} and not be empty, got {wanted!r}")
    return wanted


def _choose_setting(
    profile: Profile, request: dict[str, Any], kind: str | None, worst: bool, dtype: str | None, *, plain: bool
) -> _Setting:
    """Return how chunks are coded to keep a request; `plain`: chunks without token ids.

    Raises:
        InputError, ProfileError: as `Profile.resolve`.
    """
    name, value = one_request(**request)
    if value == LOSSLESS:
        return _Setting(Scheme.LOSSLESS, 0)
    if finer := profile.least_promise(name, value, kind, worst, plain=plain):
        of = " of chunks without token ids" if plain else ""
        _log.info("%s=%.3g is below %.3g, the least that the profile's curve%s reaches: lossless instead", *finer, of)
        return _Setting(Scheme.LOSSLESS, 0)
    return _Setting(Scheme.TRANSFORM, profile.resolve(**request, kind=kind, worst=worst, dtype=dtype, plain=plain))


def _in_parts(setting: _Setting, refinements: int) -> _Setting:
    """Return the setting of a base that has, with its refinement, the error of a blob with `setting`.

    Chunks that are coded without loss are one part.
    """
    if setting.scheme is Scheme.LOSSLESS:
        return setting
    return _Setting(setting.scheme, min(setting.step_index + FINER * refinements, 8 * OCTAVE), refinements)


def _check_refinements(refinements: object, profile: Profile) -> None:
    if type(refinements) is not int or not 0 <= refinements <= MAX_REFINEMENTS:
        raise InputError(f"refinements: must be 0 … {MAX_REFINEMENTS}, got {refinements!r}")
    if refinements and not profile.learned:
        raise InputError(
            f"refinements: must be 0 with an unlearned profile, got {refinements}: learn a profile to use them"
        )


def _check_profile(profile: object) -> None:
    if isinstance(profile, Profile):
        return
    if isinstance(profile, str | os.PathLike):
        hint = f"cuvee.Profile.load({str(profile)!r}) reads one from a file"
    else:
        hint = "cuvee.calibrate(model, token_ids) learns one, and Codec.without_profile(model) needs none"
    raise InputError(f"profile: must be a Profile, got {type(profile).__name__}: {hint}")


@cache
def _warn_of_no_promise(quality: str, source: str) -> None:
    """Warn once per process, because an engine makes several codecs of one quality."""
    _log.warning(
        "quality=%r stands for a KL of %g nats per token, which a %s profile without a measured curve cannot promise: "
        "another model may lose many times that. `cuvee profile learn` learns a profile that keeps it; "
        "quality='lossless' needs none",
        quality, PRESET_KL[quality], source,
    )  # fmt: skip


@cache
def _warn_of_no_ids(has_curve: bool) -> None:
    """Warn once per process."""
    _log.warning(
        "a chunk without token ids, or with a token that has none, is coded with a profile that predicts from tokens: "
        "its blob is larger%s. Pass tokens=, or learn the profile with predict_tokens=False",
        "" if has_curve else ", and its KL may exceed the profile's curve, which was measured with ids alone",
    )


@cache
def _warn_of_other_ids() -> None:
    """Warn once per process."""
    _log.warning(
        "a chunk's values contradict most of its token ids, which makes its blob larger: pass the ids that the model "
        "read, or none"
    )


def check_tokens(tokens: int, max_tokens: int | None) -> None:
    """Refuse to restore more tokens than the caller expects.

    Raises:
        InputError: more than `max_tokens`, or an invalid limit.
    """
    if max_tokens is None:
        return
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"max_tokens: must be at least 1, or None for no limit, got {max_tokens!r}")
    if tokens > max_tokens:
        raise InputError(
            f"max_tokens: must be at least {tokens} to restore these tokens, got {max_tokens}: raise it if you expect "
            "this many"
        )


def _described(tokens: int, start: int, dtype: str, scheme: Scheme, step_index: int) -> str:
    return f"{tokens} tokens from {start} on in {dtype}, {scheme.name.lower()}, step index {step_index}"
