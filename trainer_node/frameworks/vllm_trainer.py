"""The trainer's engine for vLLM's weight transfer. Written against the source of vLLM 0.33, not run.

Guarantees: every rank iterates the source, whose gathers are collective; rank 0 alone publishes. ``send_weights``
returns on rank 0 when the stated share of the engines serves the weights. vLLM's client is not called: peers drive
their engines, and pause each for its switch alone. A program that pauses engines by itself uses peers with ``--driver
external``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.gathered_weights import GatheredWeights


@dataclass(kw_only=True)
class P2PCastTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """``rank`` of this process; rank 0 publishes. The others: ``GatheredWeights``."""

    backend: ClassVar[str] = "p2pcast"
    hub: str
    token_file: str | None = None
    base: str | None = None
    plaintext: bool = False
    live_fraction: float | None = 1.0
    live_timeout_s: float = 600.0
    first_step: int | None = None


class P2PCastTrainerEngine(TrainerWeightTransferEngine[P2PCastTrainerInitInfo]):  # type: ignore[misc]
    init_info_cls = P2PCastTrainerInitInfo

    def __init__(self, weights: GatheredWeights | None, *, client: Any, source: Any) -> None:
        """``weights``: None on ranks that do not publish."""
        super().__init__(client=client, source=source, is_sender=weights is not None)
        self._weights = weights

    @classmethod
    def trainer_init(cls, init_info: P2PCastTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Connect rank 0 to the hub. Raises UsageError without a source, and the errors of ``Publisher``."""
        if source is None:
            raise UsageError("p2pcast finds out what has changed by itself: give trainer_init a source of all weights")
        if not init_info.is_sender:
            return cls(None, client=client, source=source)
        options = {field.name: getattr(init_info, field.name) for field in fields(init_info) if field.name != "rank"}
        weights = GatheredWeights(**options)
        weights.connect()
        return cls(weights, client=client, source=source)

    def send_weights(self) -> None:
        """Publish the source's present weights. Raises the errors of ``GatheredWeights.send``."""
        full = getattr(self.source, "iter_full", None)
        tensors = iter(self.source) if full is None else full()
        if self._weights is not None:
            self._weights.send(tensors)
            return
        for _ in tensors:
            pass

    def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.close()
