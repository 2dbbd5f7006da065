"""`Codec`: chunks to blobs and back.

    encode, encode_paged   cache --Backend--> sections --container--> blobs
    open                   blob --header, tag, profile--> OpenBlob
    decode, decode_…       OpenBlob --Backend--> cache

A dense chunk is a `PagedCache` of one block, so there is one way through, whatever the device.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from cuvee.codec.backends import Backend, CodedChunk, Coding, check_backend, get_backend, has_backend
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, MIN_STREAM_BYTES
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, ProfileMismatchError, allocations
from cuvee.codec.format.container import Header, Scheme, plain_bytes, read_header, verify_tag, write_blob
from cuvee.codec.format.keys import make_keys
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profiles.class_predictor import importance_offsets
from cuvee.codec.profiles.profile import ID_BYTES, Profile
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL, one_request
from cuvee.codec.stages.implementations import stage_names

_log = logging.getLogger(__name__)

# A blob of a hundred kilobytes may claim 2^24 tokens, gigabytes of cache. As long as the contexts of most models.
MAX_DECODED_TOKENS = 1 << 17
LAST_POSITION = (1 << 32) - 1  # that a blob can name


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """A blob whose header and tag were verified by a codec: see `Codec.open`.

    Attributes:
        blob: its bytes.
        header: what they say.
        layout: of the chunk, with the dtype that its values had.
        opened_by: the codec that verified it, which alone takes it.
    """

    blob: bytes | memoryview
    header: Header
    layout: KVLayout
    opened_by: object

    @property
    def tokens(self) -> int:
        """Tokens in the chunk."""
        return self.header.tokens

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.header.start

    @property
    def dtype(self) -> str:
        """Name of the dtype that its values had."""
        return self.header.dtype


class Codec:
    """Compresses chunks with one profile at one quality. Immutable and safe to share between threads.

    Args:
        profile: what was learned for the model, or `Profile.generic(layout)`.
        quality: `"lossless"`, `"high"`, `"balanced"` or `"small"`. Default: `"balanced"`, but `"lossless"` with a
            generic profile, of which no curve was measured. A preset stands for a KL, and promises none with a profile
            that knows none, which a warning says. Or instead exactly one of
        kl: the most nats per token that the model's predictions may move, for the worst kind of text that the profile
            was measured on;
        bits: the most bits per value, all bytes counted;
        ratio: the least uncompressed over compressed size, of caches of `dtype`;
        step: the quantizer step itself, in the profile's units.
            All but `step` are limits, and the best that keeps one is taken. Where all of the profile's curve keeps
            it, that is an end of the curve. Where no step keeps a KL, the codec is lossless. Where no step keeps a
            size, an error names the range.
        kind: with kl= or a preset: the kind of text (`profile.curves`) whose curve decides, instead of the worst.
        dtype: with ratio=: of the caches, `"float32"` for example; by default their values count as 16 bits, whatever
            the profile was learned in. Chunks of every dtype may be coded either way.
        backend: `"auto"` (by the tensors' device), `"numba"` or `"reference"` on the CPU, `"triton"` on a GPU.
        threads: sections coded at the same time, in chunks of a million values or more. Default: the number of CPUs.
        key: 16 to 64 secret bytes; blobs then carry an authentication tag, and only blobs with a valid one decode. Or
            several secrets: blobs get a tag of the first, and are accepted with a tag of any. `associated_data=` binds
            a blob to where it belongs. Such a codec refuses to be pickled: the bytes would hold the secret.

    Raises:
        InputError: an argument out of range, or several qualities at once; `profile` is no `Profile`.
        ProfileError: no step of the profile's curve is as small as asked, or the curve was not measured.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout)
        >>> codec = Codec(Profile.generic(layout), "lossless")
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
        dtype: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        key: bytes | Sequence[bytes] | None = None,
    ) -> None:
        _check_profile(profile)
        if threads is not None and threads < 1:
            raise InputError(f"threads={threads} must be at least 1")
        if (quality, kl, bits, ratio, step) == (None,) * 5:
            quality = profile.default_quality
        name, value = one_request(quality=quality, kl=kl, bits=bits, ratio=ratio, step=step)
        self.profile = profile
        self.lossless = value == LOSSLESS
        if finer := profile.least_promise(name, value, kind):
            _log.info("%s=%.3g is below %.3g, the least that the profile's curve reaches: lossless instead", *finer)
            self.lossless = True
        if quality in PRESET_KL and not profile.promises_kl:
            _warn_of_no_promise(quality, profile.source)
        if self.lossless:
            self.step_index = 0
        else:
            self.step_index = profile.resolve(quality, kl=kl, bits=bits, ratio=ratio, step=step, kind=kind, dtype=dtype)
        self.threads = threads or os.cpu_count() or 1
        self._backend_name = check_backend(backend)
        self._identity = object()  # of which `OpenBlob`s tell who verified them
        self._keys = make_keys(key)
        lossy = Scheme.TRANSFORM if profile.learned else Scheme.GENERIC
        self._own = Scheme.LOSSLESS if self.lossless else lossy
        self._layouts: dict[str, KVLayout] = {}
        self._backends: dict[str, Backend] = {}
        on_host = backend if backend in stage_names() else "auto"
        host = get_backend(on_host, "cpu", self.threads)
        host.prepare(self._own_coding(profile.layout.dtype))  # a step out of the plan's reach fails here, not later
        if backend in ("auto", host.name):
            self._backends["cpu"] = host

    @classmethod
    def without_profile(
        cls,
        model: object,
        quality: str = LOSSLESS,
        *,
        backend: str = "auto",
        threads: int | None = None,
        key: bytes | Sequence[bytes] | None = None,
    ) -> Codec:
        """A codec that needs no profile: lossless unless another `quality` is asked for.

        Args:
            model: whose caches: a transformers model or its configuration, or a `KVLayout`.
            quality: `"lossless"`, or a preset, which promises no KL here.
            backend: see `Codec`.
            threads: see `Codec`.
            key: see `Codec`.

        Raises:
            InputError: `model` is none of these; an argument out of range.
            UnsupportedModelError: a model whose cache cuvee does not know.

        Example:
            >>> from cuvee import Codec
            >>> from transformers import LlamaConfig
            >>> Codec.without_profile(LlamaConfig(num_hidden_layers=2, dtype="bfloat16")).lossless
            True
        """
        return cls(Profile.generic(KVLayout.of(model)), quality, backend=backend, threads=threads, key=key)

    def __getstate__(self) -> dict[str, object]:
        """Without the backends, which are made again where the codec arrives."""
        return {**self.__dict__, "_backends": {}}

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """8 bytes that name each key and do not tell it, the one that writes first; empty without `key=`."""
        return tuple(key.id for key in self._keys)

    def encode(self, chunk: KVChunk, *, importance: object = None, associated_data: bytes = b"") -> bytes:
        """Compress a chunk into one blob, on the device where the chunk is.

        Args:
            chunk: what to compress.
            importance: how much a squared error on each token counts, `[T]` non-negative numbers of which only the
                ratios matter: attention received, say. Takes the place of the profile's own prediction. Default: the
                profile says. A lossless codec needs none.
            associated_data: with a key, what the blob is bound to, such as the name under which a store keeps it. The
                blob does not contain these bytes, and decodes only where the same bytes are given.

        Raises:
            ProfileMismatchError: the chunk's layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite); importance of another length,
                negative, or not finite, or with a profile that is not learned; `associated_data` without a key.
        """
        self.profile.check_layout(chunk.layout)
        cache = PagedCache.dense(chunk.layout, chunk.keys, chunk.values)
        slots = torch.arange(chunk.tokens, device=chunk.device)
        return self.encode_paged(
            cache, [slots], [chunk.start], importance=[importance], associated_data=[associated_data]
        )[0]

    def decode(
        self,
        blob: bytes | memoryview | OpenBlob,
        start: int | None = None,
        *,
        tokens: range | None = None,
        device: torch.device | str = "cpu",
        associated_data: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> KVChunk:
        """Restore a chunk. Any blob of this codec's profile will do, whatever quality it was encoded at.

        Args:
            blob: what `encode` made, or what `open` made of it.
            start: position of the first restored token; None leaves it where it was.
            tokens: restore only these tokens of the chunk, without gaps. Default: all.
            device: where the chunk is restored.
            associated_data: what the blob was bound to when it was encoded; with an `OpenBlob`, `open` was given it.
            max_tokens: refuse to restore more: a small blob may claim a huge cache. Give what you expect where blobs
                come from others: the default, 131072, is 17 GB for a model of 8 B parameters. None: whatever it says.

        Raises:
            FormatError, VersionError, CorruptError: bytes that are not a whole, undamaged blob; with a key, bytes that
                were changed or bound to something else than `associated_data`.
            KeyMismatchError: a tag of another key, a tag and no key, or a key and no tag.
            ProfileMismatchError: a blob of another profile or model.
            InputError: a target position the model does not have, or a run outside the chunk; more than `max_tokens`;
                `associated_data` without a key.
            OutOfMemoryError: the tensors cannot be allocated.
        """
        opened = self._opened(blob, associated_data)
        wanted = _within("tokens", range(opened.tokens) if tokens is None else tokens, opened.tokens, "of the blob")
        layers = range(self.profile.layout.num_layers)
        keys, values, start = self._restore(opened, layers, wanted, start, torch.device(device), max_tokens)
        return KVChunk(keys, values, opened.layout, start)

    def decode_layers(
        self,
        blob: bytes | memoryview | OpenBlob,
        layers: range,
        start: int | None = None,
        *,
        device: torch.device | str = "cpu",
        associated_data: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Restore only some layers, reading only their sections: layer-wise restoring.

        Args:
            blob: see `decode`.
            layers: without gaps.
            start: see `decode`.
            device: see `decode`.
            associated_data: see `decode`.
            max_tokens: see `decode`.

        Returns:
            keys and values, one `[T, H, D]` tensor per layer.

        Raises:
            as `decode`; InputError for layers the model does not have.
        """
        opened = self._opened(blob, associated_data)
        layers = self._check_layers(layers)
        keys, values, _ = self._restore(opened, layers, range(opened.tokens), start, torch.device(device), max_tokens)
        return keys[layers.start : layers.stop], values[layers.start : layers.stop]

    def on_device(self, device: torch.device | str) -> bool:
        """Whether caches on `device` are coded there, many chunks in one go: `encode_paged` and `decode_paged`.

        If not, code a copy on the CPU.

        Raises:
            InputError: the backend asked for cannot run here, or does not serve that device.
        """
        kind = torch.device(device).type
        return has_backend(self._backend_name, kind) and self._backend(kind).batched

    def open(self, blob: bytes | memoryview, *, associated_data: bytes = b"") -> OpenBlob:
        """Verify a blob once: its header, its tag and whose it is. Sections are looked at when they are decoded.

        Every method that decodes takes the result in place of the bytes, and does not verify them again.

        Args:
            blob: what `encode` made. Bytes that change after they were opened are not noticed.
            associated_data: what the blob was bound to when it was encoded.

        Raises:
            FormatError, VersionError, CorruptError, KeyMismatchError, ProfileMismatchError: as `decode`.
            InputError: `associated_data` without a key; `blob` is no bytes.

        Example:
            >>> import torch
            >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile
            >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
            >>> chunk = KVChunk(torch.randn(3, 64, 2, 8), torch.randn(3, 64, 2, 8), layout)
            >>> codec = Codec(Profile.generic(layout), "lossless", key=bytes(range(16)))
            >>> opened = codec.open(codec.encode(chunk, associated_data=b"chunk 7"), associated_data=b"chunk 7")
            >>> opened.tokens, codec.decode(opened, tokens=range(10, 20)).tokens
            (64, 10)
        """
        self._check_associated(associated_data)
        blob = plain_bytes(blob)
        header = read_header(blob)
        verify_tag(blob, header, self._keys, associated_data)
        return OpenBlob(blob, header, self._check_header(header), self._identity)

    def open_expected(
        self, blob: bytes | memoryview, *, tokens: int, start: int | None, dtype: str, associated_data: bytes = b""
    ) -> OpenBlob:
        """Open a blob that says that this very codec wrote it for so many tokens from `start` on.

        `open` takes any quality of its profile. What came from a store by its key must also be of the quality that the
        key stands for.

        Args:
            blob: what came from a store.
            tokens: that it must hold.
            start: position that the first of them must have; None: any.
            dtype: that the tokens must have had.
            associated_data: as in `open`.

        Raises:
            CorruptError: it holds other tokens, or was coded by another scheme or at another step.
            FormatError, VersionError, KeyMismatchError, ProfileMismatchError: as `decode`.
        """
        self._check_associated(associated_data)
        blob = plain_bytes(blob)
        header = read_header(blob)
        layout = self._check_header(header)
        found = (header.tokens, header.start, header.dtype, header.scheme, header.step_index)
        wanted = (tokens, header.start if start is None else start, dtype, self._own, self.step_index)
        if found != wanted:
            raise CorruptError(f"the entry holds {_told(*found)}; expected {_told(*wanted)}")
        verify_tag(blob, header, self._keys, associated_data)
        return OpenBlob(blob, header, layout, self._identity)

    def encode_paged(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int],
        *,
        importance: Sequence[object] | None = None,
        associated_data: Sequence[bytes] | None = None,
    ) -> list[bytes]:
        """Compress chunks straight out of a serving engine's cache, all in one go.

        Args:
            cache: where the tokens lie.
            slots: of each chunk, int64 `[T]` on the cache's device: the slots of its tokens, in order.
            starts: of each chunk, the position of its first token.
            importance: of each chunk, as in `encode`.
            associated_data: of each chunk, as in `encode`.

        Returns:
            one blob per chunk. They hold values of `cache.layout.dtype`, whatever the cache stores.

        Raises:
            as `encode`; InputError for slots that the cache does not have.
        """
        self.profile.check_layout(cache.layout)
        if len(slots) != len(starts):
            raise InputError(f"slots are given for {len(slots)} chunks, starts for {len(starts)}")
        weights = [None] * len(slots) if importance is None else list(importance)
        if len(weights) != len(slots):
            raise InputError(f"importance is given for {len(weights)} chunks, slots for {len(slots)}")
        bound = self._each_associated(associated_data, len(slots))
        for at, start in zip(slots, starts, strict=True):
            if not len(cache.check_slots(at)):
                raise InputError("slots name no tokens: a chunk needs at least one")
            self._check_start(start, len(at))
        offsets = [self._offsets(own, len(at)) for own, at in zip(weights, slots, strict=True)]
        backend = self._backend(cache.device.type)
        chunks = backend.encode(self._own_coding(cache.layout.dtype), cache, slots, starts, offsets) if slots else []
        return [
            self._blob(cache.layout, len(at), start, sections, to)
            for at, start, sections, to in zip(slots, starts, chunks, bound, strict=True)
        ]

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
        """Restore chunks straight into a serving engine's cache, all in one go.

        On a device this only starts the work, on its current stream: call `check()` of the result before anything
        is believed that was read from those slots. What lies in them after a failure is not defined.

        Args:
            blobs: what `encode` or `encode_paged` made, of any quality of this profile, or what `open` made of it.
            cache: where the tokens go.
            slots: of each blob, int64 `[T]` on the cache's device; -1 leaves a token out. They are the limit to what
                blobs may hold.
            starts: of each blob, the position that its first token gets; default: where it was.
            layers: restore only these, reading only their sections; default all.
            associated_data: of each blob, as in `decode`.

        Raises:
            as `decode`, at once for what headers and checksums tell, from `check()` for damaged streams.
        """
        self.profile.check_layout(cache.layout)
        layers = self._check_layers(range(cache.layout.num_layers) if layers is None else layers)
        if len(slots) != len(blobs) or (starts is not None and len(starts) != len(blobs)):
            raise InputError(f"blobs, slots and starts must be of one length; there are {len(blobs)} blobs")
        bound = self._each_associated(associated_data, len(blobs))
        opened = [self._opened(blob, to) for blob, to in zip(blobs, bound, strict=True)]
        for one, at in zip(opened, slots, strict=True):
            cache.check_slots(at, one.tokens)
        backend = self._backend(cache.device.type)
        work: dict[Coding, list[CodedChunk]] = defaultdict(list)
        for number, (one, at) in enumerate(zip(opened, slots, strict=True)):
            start = one.start if starts is None else starts[number]
            self._check_move(one.layout, one.start, start, one.tokens)
            work[self._coding(one.header)].append(CodedChunk(one.blob, one.header, at, start, number))
        with allocations(f"decoding {sum(one.tokens for one in opened)} tokens"):
            return PendingDecode(
                tuple(backend.decode(coding, chunks, cache, layers) for coding, chunks in work.items())
            )

    def _restore(
        self,
        opened: OpenBlob,
        layers: range,
        wanted: range,
        start: int | None,
        device: torch.device,
        max_tokens: int | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        """Keys, values (per layer; empty outside `layers`) and the position of the first of them."""
        count, kept = len(wanted), opened.start + wanted.start
        check_tokens(count, max_tokens)
        start = kept if start is None else start
        self._check_move(opened.layout, kept, start, count)
        coding, backend = self._coding(opened.header), self._backend(device.type)
        with allocations(f"decoding {count} tokens"):
            keys, values = _outputs(opened.layout, layers, count, device)
            slots = torch.full((opened.tokens,), NOWHERE, dtype=torch.int64, device=device)
            slots[wanted.start : wanted.stop] = torch.arange(count, device=device)
            # The whole chunk moves with its wanted tokens: its first one may come to lie before position 0.
            chunk = CodedChunk(opened.blob, opened.header, slots, start - wanted.start)
            backend.decode(coding, [chunk], PagedCache.dense(opened.layout, keys, values), layers)()
        return keys, values, start

    def _backend(self, device_type: str) -> Backend:
        if device_type not in self._backends:
            self._backends[device_type] = get_backend(self._backend_name, device_type, self.threads)
        return self._backends[device_type]

    def _own_coding(self, dtype: str) -> Coding:
        return Coding(self.profile, self._own, self.step_index, dtype)

    def _opened(self, blob: bytes | memoryview | OpenBlob, associated_data: bytes) -> OpenBlob:
        if not isinstance(blob, OpenBlob):
            return self.open(blob, associated_data=associated_data)
        if blob.opened_by is not self._identity:
            raise InputError(
                "blob: this OpenBlob was opened by another codec, with other keys maybe: open it with this one"
            )
        if associated_data:
            raise InputError("associated_data= belongs to open(): an OpenBlob was verified there")
        return blob

    def _offsets(self, importance: object, tokens: int) -> torch.Tensor | None:
        if importance is None:
            return None
        offsets = importance_offsets(importance, tokens)
        if self._own is Scheme.GENERIC:
            raise InputError("importance needs a learned profile: a generic one quantizes all tokens alike")
        return offsets

    def _blob(
        self, layout: KVLayout, tokens: int, start: int, sections: Sequence[bytes], associated_data: bytes
    ) -> bytes:
        profile = bytes(ID_BYTES) if self.lossless else self.profile.id
        return write_blob(
            self._own, layout.dtype, tokens, start, self.step_index, layout.values_per_token, layout.fingerprint,
            profile, sections, self._keys[0] if self._keys else None, associated_data,
        )  # fmt: skip

    def _coding(self, header: Header) -> Coding:
        if header.scheme is Scheme.LOSSLESS:
            return Coding(self.profile, header.scheme, 0, header.dtype)
        if (header.scheme is Scheme.TRANSFORM) != bool(self.profile.learned):
            raise FormatError(f"a {header.scheme.name.lower()} blob does not belong to a {self.profile.source} profile")
        return Coding(self.profile, header.scheme, self.profile.check_step_index(header.step_index), header.dtype)

    def _check_layers(self, layers: range) -> range:
        return _within("layers", layers, self.profile.layout.num_layers, "of the model")

    def _check_start(self, start: object, tokens: int) -> int:
        if type(start) is not int or not 0 <= start <= LAST_POSITION - tokens:
            raise InputError(f"start={start!r} must be a position, an int >= 0 and below 2**32 - {tokens}")
        limit = self.profile.layout.max_positions
        if limit is not None and start + tokens > limit:
            raise InputError(f"start={start} puts {tokens} tokens past the {limit} positions of the model")
        return start

    def _check_move(self, layout: KVLayout, kept: int, start: int, tokens: int) -> None:
        if self._check_start(start, tokens) != kept and not layout.relocatable:
            raise InputError(f"{layout.model_type} has no RoPE: its cache cannot move from position {kept} to {start}")

    def _check_associated(self, associated_data: object) -> None:
        if not isinstance(associated_data, bytes):
            raise InputError(f"associated_data must be bytes, got {type(associated_data).__name__}")
        if associated_data and not self._keys:
            raise InputError("associated_data= binds a blob by its tag, which only a Codec with a key= writes")

    def _each_associated(self, associated_data: Sequence[bytes] | None, count: int) -> Sequence[bytes]:
        if associated_data is None:
            return [b""] * count
        if len(associated_data) != count:
            raise InputError(f"associated_data is given for {len(associated_data)} chunks, there are {count}")
        for own in associated_data:
            self._check_associated(own)
        return associated_data

    def _check_header(self, header: Header) -> KVLayout:
        layout = self._layout(header.dtype)
        if header.layout != layout.fingerprint:
            raise ProfileMismatchError("the blob holds the cache of another model than the profile's")
        if header.scheme is not Scheme.LOSSLESS and header.profile != self.profile.id:
            raise ProfileMismatchError(
                f"the blob was encoded with profile {header.profile.hex()}, this codec has {self.profile.id.hex()}"
            )
        sections = len(self.profile.sections) if header.scheme is Scheme.TRANSFORM else layout.num_layers
        if len(header.section_bytes) != sections or header.values_per_token != layout.values_per_token:
            raise FormatError(f"the blob has {len(header.section_bytes)} sections, expected {sections}")
        # The bytes of a section bound its streams, and so the tokens and the memory that a header may ask for.
        if min(header.section_bytes) * MAX_TOKENS_PER_STREAM < MIN_STREAM_BYTES * header.tokens:
            raise FormatError(f"{min(header.section_bytes)} bytes cannot hold {header.tokens} tokens")
        return layout

    def _layout(self, dtype: str) -> KVLayout:
        if dtype not in self._layouts:
            self._layouts[dtype] = replace(self.profile.layout, dtype=dtype)
        return self._layouts[dtype]


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Decoding that was started. `check` waits for it; until then nobody knows whether the streams were whole.

    Any thread may call `check`, on any stream: what was decoded is in the cache when it returns, or raises.
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
                except CuveeError as error:  # those behind it still write to the cache
                    problem = problem or error
        if problem is not None:
            raise problem


def _within(name: str, wanted: object, count: int, of: str) -> range:
    """What is wanted of so many: a range without gaps that is not empty."""
    if not isinstance(wanted, range):
        raise InputError(f"{name} must be a range, such as range(0, {count}), got {wanted!r}")
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= count:
        raise InputError(f"{name} must lie within the {count} {name} {of} and not be empty, got {wanted!r}")
    return wanted


def _check_profile(profile: object) -> None:
    if isinstance(profile, Profile):
        return
    if isinstance(profile, str | os.PathLike):
        hint = f"cuvee.Profile.load({str(profile)!r}) reads one from a file"
    else:
        hint = "cuvee.calibrate(model, token_ids) learns one, and Codec.without_profile(model) needs none"
    raise InputError(f"profile must be a Profile, got {type(profile).__name__}: {hint}")


@cache
def _warn_of_no_promise(quality: str, source: str) -> None:
    """Once per process: an engine makes several codecs of one quality."""
    _log.warning(
        "quality=%r stands for a KL of %g nats per token, which a %s profile without a measured curve cannot promise: "
        "another model may lose many times that. `cuvee profile learn` learns a profile that keeps it; "
        "quality='lossless' needs none",
        quality, PRESET_KL[quality], source,
    )  # fmt: skip


def check_tokens(tokens: int, max_tokens: int | None) -> None:
    """Refuse to restore more tokens than the caller expects.

    Raises:
        InputError: more than `max_tokens`, or a limit that is none.
    """
    if max_tokens is None:
        return
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"max_tokens={max_tokens!r} must be at least 1, or None for no limit")
    if tokens > max_tokens:
        raise InputError(
            f"{tokens} tokens would be restored, more than max_tokens={max_tokens}: if so many are expected, say so"
        )


def _told(tokens: int, start: int, dtype: str, scheme: Scheme, step_index: int) -> str:
    return f"{tokens} tokens from {start} on in {dtype}, {scheme.name.lower()}, step index {step_index}"


def _outputs(
    layout: KVLayout, layers: range, tokens: int, device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Uninitialized `[tokens, H, D]` keys and values of each layer; `[0, H, D]` for those not in `layers`."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for index, layer in enumerate(layout.layers):
        rows = tokens if index in layers else 0
        for tensors, size in ((keys, layer.head_dim), (values, layer.value_dim)):
            tensors.append(torch.empty(rows, layer.kv_heads, size, dtype=layout.torch_dtype, device=device))
    return keys, values
