"""Compressed KV offload for vLLM: `CuveeConnector`, loaded by module path or as a plug-in. See README.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.integrations.vllm.connector import CuveeConnector

__all__ = ["CuveeConnector", "register"]


def register() -> None:
    """Make the connector known to vLLM by its name (entry point `vllm.general_plugins`, called in every process)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "CuveeConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("CuveeConnector", __name__, "CuveeConnector")


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
