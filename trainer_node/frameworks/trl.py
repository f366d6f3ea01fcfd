"""TRL: everything that its users need of p2pcast.

    from trainer_node.frameworks.trl import P2PCast

    transfer = P2PCast("hub:7077", token_file="token", base="Qwen3-8B")
    AsyncGRPOTrainer(…, weight_transfer=transfer).train()

``P2PCast``: weights of ``AsyncGRPOTrainer``. ``LedgerRollouts``: its rollouts, from a ledger. ``PublishCallback``:
weights of any trainer that is built on transformers' ``Trainer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer_node.frameworks.trl_rollouts import LedgerRollouts
from trainer_node.frameworks.trl_transfer import P2PCast

if TYPE_CHECKING:
    from trainer_node.frameworks.transformers_callback import PublishCallback

__all__ = ["LedgerRollouts", "P2PCast", "PublishCallback"]


def __getattr__(name: str) -> Any:
    # transformers is loaded for its users alone.
    if name == "PublishCallback":
        from trainer_node.frameworks.transformers_callback import PublishCallback

        return PublishCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
