"""What an engine with some flags would write about itself. No weights are loaded, and no engine is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from cuvee.codec.errors import InputError
from cuvee.integrations.identity.records import IdentityRecord
from cuvee.integrations.vllm import register
from cuvee.integrations.vllm.setup import Setup


def planned_record(flags: Sequence[str]) -> IdentityRecord:
    """Return the record that an engine started with these flags, in this environment, would write.

    Reads the checkpoint's files, which name the weights, and the profile.

    Args:
        flags: of `vllm serve`. `--kv-transfer-config` may be left out: the connector then has its defaults.

    Raises:
        ImportError: vLLM is not installed.
        InputError: a flag that vLLM does not know or take, or a model that is not there.
        UnsupportedModelError, ProfileMismatchError, FileNotFoundError, CuveeError: as `Setup.planned` and
            `Setup.identity`.
    """
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise ImportError(f"--model: needs vLLM 0.32 or newer in this environment: {error}") from error

    class Parser(FlexibleArgumentParser):  # type: ignore[misc, unused-ignore]
        def error(self, message: str) -> NoReturn:
            raise InputError(f"flags: must be those of `vllm serve`, got others: {message}")

    register()
    parsed = make_arg_parser(Parser()).parse_args([*flags])
    if parsed.kv_transfer_config is None:
        parsed.kv_transfer_config = KVTransferConfig(kv_connector="CuveeConnector", kv_role="kv_both")
    if (name := parsed.kv_transfer_config.kv_connector) != "CuveeConnector":
        raise InputError(f"kv-transfer-config: must name CuveeConnector, got {name!r}")
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except ValueError as error:  # pydantic's are such
        raise InputError(f"flags: must be ones that vLLM takes together, got others: {error}") from error
    setup = Setup.planned(config)
    return setup.record(setup.identity(config))
