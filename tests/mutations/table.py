"""Every defence of docs/threats.md."""

from __future__ import annotations

from getting_in import GETTING_IN
from inside import FROM_INSIDE, MIRRORS
from local import LOCAL
from mutation import Mutation
from owned import OWNED
from releases import RELEASES
from wearing_out import SAID, WEARING_OUT

MUTATIONS: list[Mutation] = [*GETTING_IN, *FROM_INSIDE, *MIRRORS, *LOCAL, *WEARING_OUT, *SAID, *OWNED, *RELEASES]
