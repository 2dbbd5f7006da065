"""Compressed KV offload for vLLM: `CuveeConnector`, loaded by module path or as a plug-in. See README.md."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuvee.integrations.vllm.connector import CuveeConnector

__all__ = ["CuveeConnector", "register"]

_VLLMS_OWN = ("type", "module_path", "backpressure")  # in the entry of a tier


def register() -> None:
    """Make the connector known to vLLM by its name (entry point `vllm.general_plugins`, called in every process)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "CuveeConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("CuveeConnector", __name__, "CuveeConnector")
        KVConnectorFactory.get_connector_class = _checking(KVConnectorFactory.get_connector_class)


def _checking(find_class: Any) -> Any:
    """Have vLLM refuse options while it reads its own: before it loads a model, and not minutes later."""

    def find(config: Any) -> Any:
        check_options(config.kv_connector, config.kv_connector_extra_config)
        return find_class(config)

    return staticmethod(find)


def check_options(connector: str, extra: dict[str, Any]) -> None:
    """Find out without a model whether the options of our connector, or of our tiers in vLLM's, can be right.

    Args:
        connector: `kv_connector`; others than these pass.
        extra: `kv_connector_extra_config`.

    Raises:
        CuveeError, FileNotFoundError, ImportError: as `from_dict` and `check` of `CodingOptions`.
    """
    from cuvee.integrations.vllm.connector_config import Options
    from cuvee.integrations.vllm_tier.tier_options import TierOptions

    if connector == "CuveeConnector":
        Options.from_dict(extra).check()
    tiers: Any = extra.get("secondary_tiers") if connector == "OffloadingConnector" else None
    for tier in tiers if isinstance(tiers, list) else ():
        if isinstance(tier, dict) and tier.get("type") == "CuveeTier":
            TierOptions.from_dict({name: tier[name] for name in tier if name not in _VLLMS_OWN}).check()


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
