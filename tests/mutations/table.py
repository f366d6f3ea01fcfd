"""Every defence of docs/design/security.md."""

from __future__ import annotations

from admission import ADMISSION
from availability import AVAILABILITY
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

MUTATIONS: list[Mutation] = [
    *ADMISSION,
    *INPUTS,
    *FROM_INSIDE,
    *MIRRORS,
    *LOCAL,
    *LOST,
    *ONE_VERSION,
    *STOLEN_PEER,
    *RELEASES,
    *ROLLOUTS,
    *ROLLOUT_TASKS,
    *ROLLOUT_TRUST,
    *AVAILABILITY,
    *SAID,
    *EXHAUSTION,
]
