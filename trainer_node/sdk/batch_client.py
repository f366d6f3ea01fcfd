"""The old import path of ``p2pcast.ledger_api.batch_client``, used until 0.3."""

from __future__ import annotations

import warnings

from p2pcast.ledger_api.batch_client import (
    BatchClient,
    Finished,
    GroupReport,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RunFacts,
    Wait,
)

__all__ = ["BatchClient", "Finished", "GroupReport", "Rollout", "RolloutBatch", "RolloutGroup", "RunFacts", "Wait"]

warnings.warn(f"{__name__} has moved to {BatchClient.__module__}", DeprecationWarning, stacklevel=2)
