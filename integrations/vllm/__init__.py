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
    """Have vLLM miss a profile while it reads its options: before it loads a model, and not minutes later."""

    def find(config: Any) -> Any:
        if config.kv_connector == "CuveeConnector":
            check_profile(config.kv_connector_extra_config)
        return find_class(config)

    return staticmethod(find)


def check_profile(options: dict[str, Any]) -> None:
    """Find out without a model whether there is a file where option `profile` names one.

    Raises:
        FileNotFoundError: there is none.
    """
    from cuvee.integrations.profiles.location import names_collection

    profile = options.get("profile")
    if isinstance(profile, str) and not names_collection(profile) and not Path(profile).is_file():
        raise FileNotFoundError(errno.ENOENT, "profile: no such file", profile)


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
