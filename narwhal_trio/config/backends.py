"""What the configuration knows of the two kinds of engines: which names belong together. How they speak is `narwhal_trio.engines`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import attrs

__all__ = ["BACKENDS", "Backend"]

_ATTESTED_OPTIONAL = frozenset(
    {
        "transfer_version",
        "connector_version",
        "model_architecture",
        "model_dtype",
        "kv_heads",
        "head_size",
        "hidden_layers",
        "attention_backend",
        "kv_cache_dtype",
        "cross_layers_blocks",
        "hybrid_kv_cache_manager",
        "kv_role",
        "transfer_mode",
        "speculative_config",
    }
)


@attrs.frozen
class Backend:
    """Names that belong to one kind of engine. unattested: contract fields that this kind cannot attest."""

    name: str
    connector: str
    dialect: str
    contract_connector: str
    unattested: frozenset[str] = frozenset()

    @property
    def attested_optional(self) -> frozenset[str]:
        return _ATTESTED_OPTIONAL - self.unattested


BACKENDS: Final = MappingProxyType(
    {
        "vllm": Backend("vllm", connector="nixl", dialect="vllm", contract_connector="NixlConnector"),
        "sglang": Backend(
            "sglang",
            connector="mooncake",
            dialect="sglang",
            contract_connector="mooncake",
            unattested=frozenset(
                {
                    "connector_version",
                    "cross_layers_blocks",
                    "hybrid_kv_cache_manager",
                    "kv_role",
                    "transfer_mode",
                    "enforce_handshake_compat",
                }
            ),
        ),
    }
)
