"""`Codec`: chunks to blobs and back.

    encode, encode_parts   chunk, pages --EncodeRequest--> Backend --sections--> blobs
    open                   blob --header, tag, profile--> OpenBlob            (coding/opening.py)
    decode, decode_paged   OpenBlob --DecodeRequest--> Backend --> tensors, pages

What a quality means for a profile is decided once, in `profiles/setting.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Unpack, overload

import torch

from cuvee.codec.backends import Backends, PendingDecode
from cuvee.codec.chunk import KVChunk
from cuvee.codec.coding.decoding import Decoder, check_tokens, within
from cuvee.codec.coding.encoding import Encoder
from cuvee.codec.coding.id_coding import IdCoding
from cuvee.codec.coding.open_blob import Bytes, Expected, OpenBlob
from cuvee.codec.coding.opening import Opener
from cuvee.codec.errors import InputError
from cuvee.codec.format.keys import Secrets, make_keys
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL, Limits, Quality
from cuvee.codec.profiles.setting import Settings, check_profile, check_refinements, warn_of_no_promise
from cuvee.codec.states import States, decode_states, encode_states
from cuvee.codec.support.devices import usable_device
from cuvee.codec.support.torch_modes import without_modes

# As long as the contexts of most models. Without a limit, a small blob may claim 2^24 tokens: gigabytes of cache.
MAX_DECODED_TOKENS = 1 << 17

OneOrEach = bytes | Sequence[bytes]  # associated data: of a chunk, or of each of several


class Codec:
    """Compresses chunks with one profile at one quality. Immutable and safe to share between threads.

    Args:
        profile: a profile learned for the model, or `Profile.unlearned(layout)`, which is lossless.
        quality: `"lossless"`, `"high"`, `"balanced"`, `"small"` or a `Quality`, which says what they promise. Default:
            `"balanced"`, but `"lossless"` with an unlearned profile, which takes no other.
        backend: `"auto"` (by the tensors' device), `"numba"` on the CPU, `"triton"` on a GPU.
        threads: sections coded at the same time, in chunks of a million values or more. Default: the number of CPUs.
        refinements: 1 to encode with `encode_parts` a base and a refinement, each a blob of its own. The quality is
            that of both together, which take a few percent more bytes than one blob of it; the base alone has four
            times the quantizer step, and about twelve times the KL. Needs a learned profile. Default: 0.
        key: 16 to 64 secret bytes: blobs then carry an authentication tag, and only blobs with a valid tag decode. Of
            several secrets, the first writes the tag, and a tag of any is accepted. The codec cannot be pickled then.
        limits: in place of a quality, arguments of `Quality`: `kl=1e-3`, for example.

    Attributes:
        profile, quality, threads, refinements: as given.
        settings: how chunks are coded to keep the quality.
        lossless, step_index: how chunks with token ids are coded.

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

    @without_modes
    def __init__(
        self,
        profile: Profile,
        quality: str | Quality | None = None,
        *,
        backend: str = "auto",
        threads: int | None = None,
        refinements: int = 0,
        key: Secrets | None = None,
        **limits: Unpack[Limits],
    ) -> None:
        check_profile(profile)
        check_refinements(refinements, profile)
        if threads is not None and threads < 1:
            raise InputError(f"threads: must be at least 1, got {threads}")
        self.profile = profile
        self.quality = Quality.of(quality, limits, default=profile.default_quality)
        self.refinements = refinements
        self.threads = threads or os.cpu_count() or 1
        self.settings = Settings.choose(profile, self.quality, refinements)
        self.lossless, self.step_index = self.settings.predicted.lossless, self.settings.predicted.step_index
        if self.quality.preset in PRESET_KL and not profile.measured().knows_kl:
            warn_of_no_promise(self.quality.preset, profile.source)
        self._keys = make_keys(key)
        self._of_layouts: dict[KVLayout, Codec] = {}
        self._of_layers: dict[tuple[int, ...], Codec] = {}
        ids = IdCoding(profile, used=not self.lossless)
        self._opener = Opener(self.settings, self._keys)
        self._backends = Backends(backend, self.threads)
        self._key = self._keys[0] if self._keys else None  # which writes tags
        self._encoder = Encoder(self.settings, ids, self._key)
        self._decoder = Decoder(self._opener, ids, self._backends)
        self._backends.prepare(self._encoder.coding(profile.layout.dtype, profile.token_table is not None))

    @classmethod
    def without_profile(
        cls, model: object, *, backend: str = "auto", threads: int | None = None, key: Secrets | None = None
    ) -> Codec:
        """Make a lossless codec, which needs no profile.

        `model` is that of the caches: a transformers model, its configuration, or a `KVLayout`. The other arguments are
        those of `Codec`.

        Raises:
            InputError: `model` is none of these; an argument out of range.
            UnsupportedModelError: a model whose cache cuvee does not support.

        Example:
            >>> from cuvee import Codec
            >>> from transformers import LlamaConfig
            >>> Codec.without_profile(LlamaConfig(num_hidden_layers=2, dtype="bfloat16")).lossless
            True
        """
        layout = KVLayout.of(model, states=True)
        return cls(Profile.unlearned(layout), LOSSLESS, backend=backend, threads=threads, key=key)

    def of_layers(self, layers: Sequence[int]) -> Codec:
        """Return the codec of some of the layers, at least one: the same quality, backend, threads and keys.

        Raises:
            ProfileError: as `Profile.of_layers`.
        """
        key = tuple(layers)
        if key not in self._of_layers:
            secrets = [each.secret for each in self._keys] or None
            self._of_layers[key] = Codec(
                self.profile.of_layers(key), self.quality, backend=self._backends.name, threads=self.threads,
                refinements=self.refinements, key=secrets,
            )  # fmt: skip
        return self._of_layers[key]

    def __repr__(self) -> str:
        key = ", with a key" if self._keys else ""
        how = f"backend {self._backends.name!r}, {self.threads} threads{key}"
        return f"Codec({self.described_quality}; {how}; {self.profile!r})"

    @property
    def described_quality(self) -> str:
        """What was asked for, and the quantizer step that it takes, for people."""
        return str(self.quality) if self.quality.lossless else f"{self.quality}: {self.settings.described}"

    @property
    def quality_name(self) -> str:
        """The quality as it stands in the keys of a store: equal names of one profile mean equal blobs.

        `"lossless"` or `"step:<index>"`, then `",plain:<index>"` or `",plain:lossless"` if chunks without token ids are
        coded in another way, and `",parts:2"` if chunks are encoded as a base and a refinement.
        """
        return self.settings.name

    @property
    def key_ids(self) -> tuple[bytes, ...]:
        """8 bytes that identify each key without revealing it, the writing key first; empty without `key=`."""
        return tuple(key.id for key in self._keys)

    def on_device(self, device: torch.device | str) -> bool:
        """Return whether pages on `device` are coded there, many chunks in one call; if not, code a copy on the CPU.

        Raises:
            InputError: the codec's backend cannot run here, or does not serve that device.
        """
        kind = torch.device(device).type
        return self._backends.serve(kind) and self._backends.of(kind).batched

    @overload
    def encode(self, source: KVChunk, *, associated_data: bytes = b"") -> bytes: ...
    @overload
    def encode(self, source: PagedChunks, *, associated_data: Sequence[bytes] | None = None) -> list[bytes]: ...
    @without_modes
    def encode(self, source: KVChunk | PagedChunks, *, associated_data: OneOrEach | None = None) -> bytes | list[bytes]:
        """Compress a chunk into one blob, on the device where it is; or each chunk of a serving engine's pages.

        Args:
            source: the chunk or chunks. With a calibrated profile, the tokens at the end of a cache are coded finer.
                Slices of one chunk know how far from the end they are (`KVChunk.following`). If all tokens have ids
                (`KVChunk.token_ids`), a profile with a token table makes the blob smaller, and the blob holds them, so
                that decoding needs nothing new. Any other profile, and lossless coding, ignores them. Whether ids and
                positions are those of the cache is not checked here, but by `encode_cache` and `cuvee encode`: others
                make a blob larger, though no larger than a lossless one, and it may lose more than its KL.
            associated_data: with a key, bytes that the blob is bound to, such as its name in a store; for pages, those
                of each chunk. The blob does not contain them, and decodes only if the same bytes are given.

        Returns:
            the blob; for pages, one per chunk. Its values have the layout's dtype, whatever the pages store.

        Raises:
            ProfileMismatchError: the layout is not the profile's.
            InputError: values that a lossy quality cannot code (NaN, infinite); token ids outside the vocabulary; slots
                that the pages do not have; `associated_data` without a key; a codec with refinements.
        """
        if self.refinements:
            raise InputError(
                f"refinements: must be 0 to encode single blobs, got {self.refinements}: call encode_parts()"
            )
        blobs = [blob for (blob,) in self._encode(source, associated_data)]
        return blobs[0] if isinstance(source, KVChunk) else blobs

    @overload
    def encode_parts(self, source: KVChunk, *, associated_data: bytes = b"") -> tuple[bytes, ...]: ...
    @overload
    def encode_parts(
        self, source: PagedChunks, *, associated_data: Sequence[bytes] | None = None
    ) -> list[tuple[bytes, ...]]: ...
    @without_modes
    def encode_parts(
        self, source: KVChunk | PagedChunks, *, associated_data: OneOrEach | None = None
    ) -> tuple[bytes, ...] | list[tuple[bytes, ...]]:
        """Compress a chunk into its parts, each a blob of its own; or each chunk of a serving engine's pages.

        With `refinements=1` these are a base and a refinement. The base decodes alone, and with its refinement at the
        codec's quality, so whoever keeps or sends the parts can leave out the second. A refinement fits only the base
        that it was made with. Chunks that are coded without loss, and those of other codecs, are one part.

        Args, Raises: as `encode`; all parts of a chunk are bound to its `associated_data`.

        Example:
            >>> import torch
            >>> from cuvee import Codec, KVChunk, KVLayout, LayerLayout, fit
            >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 2, "float32", max_positions=None)
            >>> chunks = [KVChunk(torch.randn(2, 64, 2, 8), torch.randn(2, 64, 2, 8), layout) for _ in range(8)]
            >>> codec = Codec(fit(layout, chunks), "high", refinements=1)
            >>> base, refinement = codec.encode_parts(chunks[0])
            >>> fine, coarse = codec.decode(base, refinements=[refinement]), codec.decode(base)
            >>> bool((fine.keys[0] - chunks[0].keys[0]).std() < (coarse.keys[0] - chunks[0].keys[0]).std() / 2)
            True
        """
        parts = self._encode(source, associated_data)
        return parts[0] if isinstance(source, KVChunk) else parts

    def _encode(self, source: KVChunk | PagedChunks, associated_data: OneOrEach | None) -> list[tuple[bytes, ...]]:
        self.profile.check_layout(source.layout)
        requests = self._encoder.requests(source)
        bound = self._opener.each_associated(associated_data, None if isinstance(source, KVChunk) else len(requests))
        return self._encoder.encode(self._backends.of(source.device.type), source.layout, requests, bound)

    @without_modes
    def open(
        self,
        blob: Bytes,
        *,
        refinements: Sequence[Bytes] = (),
        associated_data: bytes = b"",
        expected: Expected | None = None,
    ) -> OpenBlob:
        """Verify a blob once: its header, its tag, its profile and its model. Sections are verified when decoded.

        Every method that decodes takes the result in place of the bytes, and does not verify them again.

        Args:
            blob: the result of `encode`, or the base of `encode_parts`. Later changes of these bytes go unnoticed.
            refinements, associated_data: as for `decode`.
            expected: for a blob that came from a store by its key: the tokens that it must hold, at this codec's
                quality. Default: any tokens, at any quality of the profile.

        Raises:
            FormatError, VersionError, CorruptError, KeyMismatchError, ProfileMismatchError: as `decode`; CorruptError
                for a refinement of another blob, or a blob that is not the expected one.
            InputError: `associated_data` without a key; `blob` is not bytes; too many refinements.
        """
        return self._opener.open(blob, refinements, associated_data, expected)

    @without_modes
    def verify(self, opened: OpenBlob) -> None:
        """Verify the checksums of all sections, which decoding does section by section.

        Use this if decoding must not fail midway: afterwards, only forged streams with a valid checksum can.

        Raises:
            CorruptError, FormatError: the bytes are damaged.
        """
        self._decoder.verify(opened)

    @without_modes
    def decode(
        self,
        blob: Bytes | OpenBlob,
        start: int | None = None,
        *,
        tokens: range | None = None,
        device: torch.device | str = "cpu",
        refinements: Sequence[Bytes] = (),
        associated_data: bytes = b"",
        max_tokens: int | None = MAX_DECODED_TOKENS,
    ) -> KVChunk:
        """Restore a chunk. The blob may have been encoded at any quality of this codec's profile.

        Args:
            blob: the result of `encode`, or of `open`.
            start: position of the first restored token; None keeps the position at which it was encoded.
            tokens: restore only these tokens of the chunk, a range without gaps. Default: all.
            device: where the chunk is restored, into new tensors; `decode_paged` restores into `PagedCache.dense` ones.
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
                `associated_data` without a key; a device that is not there.
            OutOfMemoryError: the tensors cannot be allocated.
        """
        opened = self._opener.opened(blob, refinements, associated_data)
        span = range(opened.tokens) if tokens is None else within("tokens", tokens, opened.tokens, "of the blob")
        check_tokens(len(span), max_tokens)
        return self._decoder.decode(opened, span, start, usable_device(device))

    @without_modes
    def encode_states(self, states: States, *, associated_data: bytes = b"") -> bytes:
        """Put what a model's layers hold after some tokens, beside keys and values, into one blob, losslessly.

        Args:
            states: named tensors, of any device. A name has 1 … 255 printable ASCII characters.
            associated_data: as for `encode`.

        Raises:
            InputError: no tensors, or such as a blob cannot hold; `associated_data` without a key.
        """
        self._opener.check_associated(associated_data)
        return encode_states(states, self._opener.layout(states.dtype), self._of_planes, self._key, associated_data)

    @without_modes
    def decode_states(
        self, blob: Bytes, *, associated_data: bytes = b"", into: Mapping[str, torch.Tensor] | None = None
    ) -> States:
        """Return the states of a blob of `encode_states`, on the CPU.

        What the names and shapes must be is for the caller to check.

        Args:
            blob: their blob.
            associated_data: as for `decode`.
            into: by name, contiguous memory on the CPU. A tensor that is coded is decoded there if its dtype and number
                of values are the same; what the memory holds after an error is undefined. Default: new memory.

        Raises:
            FormatError, VersionError, CorruptError, KeyMismatchError, ProfileMismatchError: as `decode`.
            InputError: `associated_data` without a key; `blob` is not bytes.
        """
        self._opener.check_associated(associated_data)
        return decode_states(blob, self._opener.layout, self._of_planes, self._keys, associated_data, into or {})

    def _of_planes(self, layout: KVLayout) -> Codec:
        if layout not in self._of_layouts:
            self._of_layouts[layout] = Codec.without_profile(layout, threads=self.threads)
        return self._of_layouts[layout]

    @without_modes
    def decode_paged(
        self,
        blobs: Sequence[Bytes | OpenBlob],
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
            blobs: results of `encode` or `open`, of any quality of this profile.
            slots: for each blob, int64 `[T]` on the cache's device; -1 leaves a token out. A blob must hold exactly T
                tokens.
            starts: for each blob, the position that its first token gets; default: the one at which it was encoded.
            layers: restore only these layers, and read only their sections; default all.
            associated_data: for each blob, as in `decode`.

        Raises:
            as `decode`: at once for errors in headers and checksums, from `check()` for damaged streams.
        """
        self.profile.check_layout(cache.layout)
        every = cache.layout.num_layers
        layers = range(every) if layers is None else within("layers", layers, every, "of the model")
        if len(slots) != len(blobs) or (starts is not None and len(starts) != len(blobs)):
            raise InputError(
                f"slots, starts: must be one for each of the {len(blobs)} blobs, got {len(slots)} slots and "
                f"{'no' if starts is None else len(starts)} starts"
            )
        bound = self._opener.each_associated(associated_data, len(blobs))
        opened = [self._opener.opened(blob, (), to) for blob, to in zip(blobs, bound, strict=True)]
        return self._decoder.decode_paged(opened, cache, slots, starts, layers)
