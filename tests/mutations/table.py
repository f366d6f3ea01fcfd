"""Every defence of docs/design/security.md."""

from __future__ import annotations

from admission import ADMISSION
from availability import AVAILABILITY
from deployed import DEPLOYED
from engine_weights import ENGINE_WEIGHTS
from exhaustion import EXHAUSTION, SAID
from inputs import INPUTS
from inside import FROM_INSIDE, MIRRORS
from local import LOCAL
from lost import LOST
from mutation import Mutation
from one_version import ONE_VERSION
from releases import RELEASES
from rollout_tasks import ROLLOUT_TASKS
from rollout_trust import ROLLOUT_TRUST
from rollouts import ROLLOUTS
from stolen_peer import STOLEN_PEER

TABLES: dict[str, list[Mutation]] = {
    "admission": ADMISSION,
    "inputs": INPUTS,
    "from-inside": FROM_INSIDE,
    "mirrors": MIRRORS,
    "local": LOCAL,
    "lost": LOST,
    "one-version": ONE_VERSION,
    "engine-weights": ENGINE_WEIGHTS,
    "stolen-peer": STOLEN_PEER,
    "releases": RELEASES,
    "rollouts": ROLLOUTS,
    "rollout-tasks": ROLLOUT_TASKS,
    "rollout-trust": ROLLOUT_TRUST,
    "deployed": DEPLOYED,
    "availability": AVAILABILITY,
    "said": SAID,
    "exhaustion": EXHAUSTION,
}
MUTATIONS: list[Mutation] = [mutation for table in TABLES.values() for mutation in table]
