"""Settings of a siege: its targets, its size, and their JSON form for a pipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SiegeSettings:
    """``daemons`` (the hub first) and ``https``: addresses of their ports. ``frames``: sent in each connection that
    sends frames. ``tls``: whether the daemons' links are encrypted.
    """

    daemons: list[Place]
    https: list[Place]
    token: str
    connections: int
    frames: int
    at_once: int
    seed: int
    tls: bool

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        given = json.loads(text)
        return cls(**given | {name: [(host, port) for host, port in given[name]] for name in ("daemons", "https")})
