"""``P2PCast``: TRL's ``AsyncGRPOTrainer`` sends its weights through p2pcast.

Guarantees: at a sync, rank 0 copies one gathered tensor after the other and never collects them. A sync returns when
the stated share of the engines serves the new weights, so TRL raises its ``model_version`` after the engines' switch.
No call pauses TRL's server: each peer pauses its own engines, for the switch alone.

TRL makes the calls, on rank 0 (TRL 1.16, ``WeightTransferProtocol``): ``init_weight_transfer``; for each sync
``pause``, ``send_weights``, ``resume``; at the end of ``train``, also after an error, ``destroy``. Its other ranks only
take part in gathering.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.gathered_weights import GatheredWeights
from trainer_node.frameworks.tried_versions import untried

if TYPE_CHECKING:
    import torch

TRIED: Final = ("1.16",)
"""Versions of TRL."""
logger = logging.getLogger("p2pcast.trl")


class P2PCast(GatheredWeights):
    """A weight transfer for ``AsyncGRPOTrainer(weight_transfer=…)``, with the arguments of ``GatheredWeights``. Every
    rank may make one; TRL uses that of rank 0.

    With ``live_fraction=1.0`` every engine serves the weights when TRL raises ``model_version``, as TRL promises its
    rollout worker. ``steps_a_sync``: TRL's ``weight_sync_steps``.

    Raises UsageError.
    """

    def __init__(self, hub: str, **options: Any) -> None:
        super().__init__(hub, **options)
        _check_trl()

    def init_weight_transfer(self) -> None:
        """Connect to the hub. Raises the errors of ``Publisher``."""
        self.connect()

    def pause(self) -> None:
        """Nothing: engines go on generating while a version is copied, sent and staged."""

    def resume(self) -> None:
        """Nothing: each peer has resumed its engines after their switch."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """``GatheredWeights.send``. TRL ends the job if this raises: its other ranks wait in the gathering."""
        self.send(iterator)

    def destroy(self) -> None:
        """Wait until the last version is stored, and disconnect."""
        self.close()


def _check_trl() -> None:
    """Raises UsageError without TRL; warns of versions that were not tried."""
    try:
        found = metadata.version("trl")
    except metadata.PackageNotFoundError:
        raise UsageError(f"P2PCast needs TRL: pip install 'trl=={TRIED[-1]}.*'") from None
    if (sentence := untried("TRL", found, TRIED)) is not None:
        logger.warning("%s", sentence)
