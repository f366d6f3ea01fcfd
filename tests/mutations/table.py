"""Every defence of docs/design/security.md."""

from __future__ import annotations

from getting_in import GETTING_IN
from inputs import INPUTS
from inside import FROM_INSIDE, MIRRORS
from local import LOCAL
from lost import LOST
from mutation import Mutation
from one_version import ONE_VERSION
from owned import OWNED
from releases import RELEASES
from rollouts import ROLLOUTS
from staying import STAYING
from wearing_out import SAID, WEARING_OUT

MUTATIONS: list[Mutation] = [
    *GETTING_IN,
    *INPUTS,
    *FROM_INSIDE,
    *MIRRORS,
    *LOCAL,
    *LOST,
    *ONE_VERSION,
    *OWNED,
    *RELEASES,
    *ROLLOUTS,
    *STAYING,
    *SAID,
    *WEARING_OUT,
]
