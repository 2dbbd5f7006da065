"""Compressed KV offload for vLLM: `CuveeConnector`, loaded by module path or as a plug-in. See README.md."""

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.integrations.vllm.connector import CuveeConnector

__all__ = ["CuveeConnector", "register"]


def register() -> None:
    """Make the connector known to vLLM by its name (entry point `vllm.general_plugins`, called in every process)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "CuveeConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("CuveeConnector", __name__, "CuveeConnector")
        KVConnectorFactory.get_connector_class = _checking(KVConnectorFactory.get_connector_class)


def _checking(find_class: Any) -> Any:
    """Have vLLM refuse options while it reads its own: before it loads a model, and not minutes later."""

    def find(config: Any) -> Any:
        if config.kv_connector == "CuveeConnector":
            check_options(config.kv_connector_extra_config)
        return find_class(config)

    return staticmethod(find)


def check_options(options: dict[str, Any]) -> None:
    """Find out without a model whether options, store URLs and the path of a profile can be right; nothing is opened.

    Raises:
        FileNotFoundError: there is no file where option `profile` names one.
        InputError: an unknown option, or a value that cannot be right.
        ImportError: the package of a store's client is missing.
    """
    from cuvee.integrations.profiles.location import names_collection
    from cuvee.integrations.stores import open_store
    from cuvee.integrations.vllm.connector_config import Options

    read = Options.from_dict(options)
    if read.profile is not None and not names_collection(read.profile) and not Path(read.profile).is_file():
        raise FileNotFoundError(errno.ENOENT, "profile: no such file", read.profile)
    open_store(read.store).close()  # which neither connects nor touches a disk


# Imported on first use: the other modules here work without vLLM. Hidden from type checkers: they would accept any
# name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "CuveeConnector":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from cuvee.integrations.vllm.connector import CuveeConnector
        except ImportError as error:
            raise ImportError(f"CuveeConnector needs vLLM 0.32 or newer: {error}") from error
        return CuveeConnector
