"""Fuzz targets of the rollout plane: records, and the msgpack requests that carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ledger_api import trainer_api, worker_api
from p2pcast.ledger_api.api_route import MAX_LIST, ApiRoute
from p2pcast.ledger_api.trainer_api import GROUPS, TAKE
from p2pcast.ledger_api.worker_api import LEASE, REGISTER, RESULTS, RETURN
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.record_form import RolloutRecord
from p2pcast.rollouts.result import Result, fault

GOLDEN = Path(__file__).parents[1] / "golden" / "rollouts.hex"
KINDS: tuple[type[RolloutRecord], ...] = (Group, Job, Result)
VOCABULARY = 16
ROUTES: list[ApiRoute[Any, Any]] = [
    one for module in (worker_api, trainer_api) for one in vars(module).values() if isinstance(one, ApiRoute)
]


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
        {"session": bytes(16), "results": [result]},
        {"session": bytes(16), "results": [result, result]},
        {"groups": [group]},
        {"groups": []},
    ]
    return [msgpack.packb(body) for body in bodies]


def check_request(data: bytes) -> None:
    for read, kind in (
        (lambda: RESULTS.read_request(data).results, Result),
        (lambda: GROUPS.read_request(data).groups, Group),
    ):
        try:
            rows = read()
            assert len(rows) <= MAX_LIST
            for row in rows:
                if kind.unpacked_bytes(row) <= len(row) * 64:  # larger ones wait for room at the ledger
                    kind.from_bytes(row)
        except (UsageError, RemoteError):
            continue


def api_seeds() -> list[bytes]:
    """The first byte chooses the route, and whether a request or an answer follows."""
    id_, hash_ = bytes(range(16)), bytes(range(32))
    verdict = worker_api.Settled(id_, id_, "rejected", "forged", "two schedules of one version")
    group = trainer_api.BatchGroup(b"group", [trainer_api.BatchResult(b"result", 1.0, "w", 4)])
    registration = worker_api.Registration("w", 4, "sums", hash_, 1.5, leases=[id_], lost=id_)
    returned = worker_api.ReturnRequest(id_, [id_], [worker_api.LeaseReason(id_, "engine", "")])
    lease = worker_api.LeaseAnswer([worker_api.LeaseRow(id_, b"job", 120.0, 600.0)], False, 0.2)
    batch = trainer_api.TakeAnswer(trainer_api.BatchReport(3, 0.5), id_, step=7, groups=[group])
    asked = ((REGISTER, registration), (RETURN, returned))
    answered = ((LEASE, lease), (RESULTS, worker_api.ResultsAnswer([verdict])), (TAKE, batch))
    return [
        *(bytes([2 * ROUTES.index(route)]) + route.request(one) for route, one in asked),
        *(bytes([2 * ROUTES.index(route) + 1]) + route.answer(one) for route, one in answered),
    ]


def check_api(data: bytes) -> None:
    if not data:
        return
    route = ROUTES[data[0] // 2 % len(ROUTES)]
    read, write = (route.read_answer, route.answer) if data[0] % 2 else (route.read_request, route.request)
    try:
        found = read(data[1:])
    except (UsageError, RemoteError):
        return
    assert read(write(found)) == found
