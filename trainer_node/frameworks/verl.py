"""verl's weights by p2pcast. verl imports this module where its configuration names the module:

    actor_rollout_ref.rollout.checkpoint_engine.backend=p2pcast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trainer_node.frameworks.verl
    actor_rollout_ref.rollout.checkpoint_manager_class=trainer_node.frameworks.verl.StagingCheckpointEngineManager

The import registers the backend "p2pcast". Settings and behaviour: docs/guides/verl.md.

``LedgerAgentLoopManager`` trains on the batches of a ledger: docs/guides/ledger-bridges.md.
"""

from __future__ import annotations

from trainer_node.frameworks.verl_backend import verl_versions

verl_versions.check()

from trainer_node.frameworks.verl_backend.checkpoint_engine import P2PCastCheckpointEngine  # noqa: E402
from trainer_node.frameworks.verl_backend.early_staging import StagingCheckpointEngineManager  # noqa: E402
from trainer_node.frameworks.verl_backend.ledger_rollouts import LedgerAgentLoopManager  # noqa: E402

__all__ = ["LedgerAgentLoopManager", "P2PCastCheckpointEngine", "StagingCheckpointEngineManager"]
