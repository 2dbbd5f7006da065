"""The model that SGLang serves: its checkpoint, and what the engine changes about it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_context, get_server_args

from cuvee.codec.layout import KVLayout
from cuvee.integrations.identity.checkpoint import (
    files_changed_since,
    naming_of_weights,
    read_config,
    read_layout,
    refuse_other_copies,
)
from cuvee.integrations.identity.engine_config import sglang_options
from cuvee.integrations.identity.weights_name import Make


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A checkpoint as SGLang serves it.

    Attributes:
        path: folder or hub id of the checkpoint.
        server_args: SGLang's.
        revision: of a hub id.
        overrides: SGLang's `--json-model-override-args`, parsed.
    """

    path: str
    server_args: Any
    revision: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def find(cls, model: str | None) -> ServedModel:
        """Return the model by the user's option, or by SGLang's arguments.

        Raises:
            ValueError: SGLang has published none in this process.
        """
        args = get_server_args()
        return cls(model or args.model_path, args, args.revision, json.loads(args.json_model_override_args or "{}"))

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """Return the layout of the whole model's cache, whose values have `dtype`.

        Raises:
            InputError, UnsupportedModelError: as `read_layout`.
        """
        return read_layout(self.path, dtype, revision=self.revision, overrides=self.overrides)

    def adjacent_pairs(self) -> bool:
        """Return whether SGLang rotates adjacent dimensions of the keys of multi-head latent attention.

        Raises:
            InputError: as `read_config`.
        """
        config = read_config(self.path, revision=self.revision, overrides=self.overrides)
        return bool(getattr(config, "rope_interleave", True))  # SGLang's own default

    def updated(self) -> bool:
        """Return whether SGLang has recorded another version of its weights since its start."""
        return any("weight_version" in fields for _, fields in get_context().overrides_log())

    def changed_since(self, time_ns: int) -> Path | None:
        """Return a file of the checkpoint, or of a drafter's, that was written or put there since a time."""
        drafter = self.server_args.speculative_draft_model_path
        return files_changed_since(self.path, time_ns, str(self.server_args.load_format)) or (
            files_changed_since(drafter, time_ns) if drafter else None
        )

    def naming(self, model_id: str | None, dtype: torch.dtype) -> Make:
        """Return what names the weights as this engine uses them.

        Args:
            model_id: the user's name for the weights; None: computed from the checkpoint's files.
            dtype: of the cache.

        Raises:
            InputError: as `naming_of_weights` and `set_options`.
        """
        options = sglang_options(self.server_args, named=model_id is not None)
        drafter = self.server_args.speculative_draft_model_path
        if model_id is None:
            features = {
                "download_dir": self.server_args.download_dir,
                "SGLANG_USE_MODELSCOPE": envs.SGLANG_USE_MODELSCOPE.get(),
            }
            refuse_other_copies([self.path, drafter], features)
        return naming_of_weights(
            self.path, dtype, options, model_id=model_id, revision=self.revision,
            load_format=str(self.server_args.load_format),
            drafter=drafter and (drafter, self.server_args.speculative_draft_model_revision),
        )  # fmt: skip
