"""verl's weights by p2pcast. verl imports this package where its configuration names the package:

    actor_rollout_ref.rollout.checkpoint_engine.backend=p2pcast
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=p2pcast.adapters.verl
    actor_rollout_ref.rollout.checkpoint_manager_class=p2pcast.adapters.verl.StagingCheckpointEngineManager

The import registers the backend "p2pcast". Settings and behaviour: docs/guides/verl.md.
"""

from __future__ import annotations

from p2pcast.adapters.verl import verl_versions

verl_versions.check()

from p2pcast.adapters.verl.checkpoint_engine import P2PCastCheckpointEngine  # noqa: E402
from p2pcast.adapters.verl.early_staging import StagingCheckpointEngineManager  # noqa: E402

__all__ = ["P2PCastCheckpointEngine", "StagingCheckpointEngineManager"]
