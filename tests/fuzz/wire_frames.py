"""Well-formed frames of each message, whose bodies come from the schema. Mutations of them (``mutate``) are frames that
no honest node sends: they must cause nothing but an error.
"""

from __future__ import annotations

import random
from typing import Any

from p2pcast.wire.connection import HEADER
from p2pcast.wire.messages import MAX_BODY, RECORDS, Type, encode_map
from tests.fuzz.insiders.values import Nonsense, World

BODIES = 2
"""Of each message."""
SEED = 1


def samples() -> list[tuple[Type, dict[str, Any]]]:
    nonsense = Nonsense(random.Random(SEED), World())
    found: list[tuple[Type, dict[str, Any]]] = []
    for kind in sorted(RECORDS):
        bodies = (nonsense.body(kind, right=True) for _ in range(20))
        fitting = [body for body in bodies if len(encode_map(body)) <= min(2000, MAX_BODY[kind])]
        found += [(kind, body) for body in fitting[:BODIES]]
    return found


def frames() -> list[bytes]:
    """The samples as frames, followed by a piece and a signed record."""
    found = [HEADER.pack(len(data), kind, 1, 0) + data for kind, data in ((k, encode_map(b)) for k, b in samples())]
    return [*found, HEADER.pack(50, Type.PIECE, 1, 7) + bytes(50), HEADER.pack(9, Type.BATCH, 1, 0) + bytes(9)]
