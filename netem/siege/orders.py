"""What a siege is told: whom to besiege, with how much, and how it goes over a pipe."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Orders:
    """``daemons`` (the hub first) and ``https``: where each is. ``frames``: in each connection that sends any. ``tls``: whether the daemons' links are encrypted."""

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
