"""Fuzz targets of the rollout plane: records, and the msgpack requests that carry them."""

from __future__ import annotations

from pathlib import Path

import msgpack

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.record_form import RolloutRecord
from p2pcast.rollouts.result import Result, fault
from trainer_node.ledger_server.request_form import ID_BYTES, packed_form

GOLDEN = Path(__file__).parents[1] / "golden" / "rollouts.hex"
KINDS: tuple[type[RolloutRecord], ...] = (Group, Job, Result)
ROWS = 32
VOCABULARY = 16


def _golden() -> list[bytes]:
    """Maps of a group, a job and a result, in the order of KINDS."""
    lines = dict(line.split(": ", 1) for line in GOLDEN.read_text().splitlines() if not line.startswith("#"))
    return [bytes.fromhex(lines[kind.kind]) for kind in KINDS]


def record_seeds() -> list[bytes]:
    """The first byte chooses the kind, and whether a map or a frame follows."""
    maps = _golden()
    frames = [kind.from_map(data).to_bytes() for kind, data in zip(KINDS, maps, strict=True)]
    return [bytes([number]) + data for number, data in enumerate([*maps, *frames])]


def check_record(data: bytes) -> None:
    if not data:
        return
    kind, framed = KINDS[data[0] % len(KINDS)], data[0] // len(KINDS) % 2
    try:
        found = kind.from_bytes(data[1:]) if framed else kind.from_map(data[1:])
    except RemoteError:
        return
    assert kind.from_map(found.to_map()) == found
    assert kind.from_bytes(found.to_bytes()).digest() == found.digest()
    if isinstance(found, Result):
        assert fault(found, VOCABULARY) != ""


def request_seeds() -> list[bytes]:
    group, _, result = (kind.from_map(data).to_bytes() for kind, data in zip(KINDS, _golden(), strict=True))
    bodies = [
        {"session": bytes(ID_BYTES), "results": [result]},
        {"session": bytes(ID_BYTES), "results": [result, result]},
        {"groups": [group]},
        {"groups": []},
    ]
    return [msgpack.packb(body) for body in bodies]


def check_request(data: bytes) -> None:
    try:
        form = packed_form(data, ROWS)
        if form.has("session"):
            assert len(form.binary("session", ID_BYTES)) == ID_BYTES
        for name, kind in (("results", Result), ("groups", Group)):
            for row in form.binaries(name, ROWS) if form.has(name) else ():
                if kind.unpacked_bytes(row) <= len(row) * 64:  # larger ones wait for room at the ledger
                    kind.from_bytes(row)
    except (UsageError, RemoteError):
        return
