"""A worker's memory of its engine's versions, answer by answer of the peer."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import ALL_PAGES_NAME
from rollout_node.worker.engine_versions import REMEMBERED, EngineVersions

ENGINE = "http://127.0.0.1:8000"
NAME = f"vllm:{ENGINE}"
ONE, TWO = Version(0, 1), Version(0, 2)
OLD, NEW = b"1" * 32, b"2" * 32
"""Names of schedules."""


def answer(served: Version | None, *, sparse: bool = True, run: str = "aa", **schedules: bytes) -> dict[str, Any]:
    """``served`` None: the peer has not reached its engine yet. ``schedules``: by step."""
    return {
        "run": run,
        "node": "0b",
        "kv": "recompute",
        "staged": None,
        "engines": {} if served is None else {NAME: str(served)},
        "sparse": [NAME] if sparse and served is not None else [],
        "manifests": {str(one): "5a" * 32 for one in (ONE, TWO)},
        "schedules": {f"0.{step.removeprefix('v')}": name.hex() for step, name in schedules.items()},
    }


class Peer:
    """Answers ``/versions``."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.asked = 0

    @asynccontextmanager
    async def get(self, url: str, **_: Any) -> Any:
        async def json() -> dict[str, Any]:
            return self.found

        self.asked += 1
        yield SimpleNamespace(status=200, json=json)


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def versions(peer: Peer) -> EngineVersions:
    return EngineVersions(peer, "http://127.0.0.1:7080", ENGINE)  # type: ignore[arg-type]


async def read(versions: EngineVersions, peer: Peer, found: dict[str, Any]) -> None:
    peer.found = found
    await versions.refresh()


async def test_tokens_stay_sparse_while_a_restarted_peer_does_not_know_its_engine(
    versions: EngineVersions, peer: Peer
) -> None:
    await read(versions, peer, answer(ONE, v1=OLD))
    with pytest.raises(RetryableError):
        await read(versions, peer, answer(None, v1=OLD))
    assert versions.schedule(ONE) == OLD
    assert not versions.sparse, "no request begins before the engine is known"


@pytest.mark.parametrize("sparse", [False, True])
async def test_tokens_of_a_version_keep_its_attention_when_the_engine_restarts_with_the_other_kind(
    versions: EngineVersions, peer: Peer, *, sparse: bool
) -> None:
    await read(versions, peer, answer(ONE, sparse=not sparse, v1=OLD, v2=NEW))
    await read(versions, peer, answer(TWO, sparse=sparse, v1=OLD, v2=NEW))
    assert versions.schedule(ONE) == (None if sparse else OLD)
    assert versions.schedule(TWO) == (NEW if sparse else None)
    assert versions.sparse == sparse


async def test_version_between_two_answers_has_the_attention_of_the_last_one(
    versions: EngineVersions, peer: Peer
) -> None:
    await read(versions, peer, answer(TWO, v1=OLD, v2=NEW))
    assert versions.schedule(ONE) == OLD


async def test_schedule_with_all_pages_is_named_and_dense(versions: EngineVersions, peer: Peer) -> None:
    await read(versions, peer, answer(ONE, v1=ALL_PAGES_NAME))
    assert versions.schedule(ONE) == ALL_PAGES_NAME
    assert not versions.sparse


async def test_schedules_of_another_run_are_forgotten(versions: EngineVersions, peer: Peer) -> None:
    await read(versions, peer, answer(TWO, v1=OLD, v2=NEW))
    await read(versions, peer, answer(ONE, run="bb", v1=NEW))
    assert versions.schedule(ONE) == NEW
    assert versions.schedule(TWO) is None


async def test_versions_of_another_run_take_no_room(versions: EngineVersions, peer: Peer) -> None:
    many = answer(Version(0, 9999))
    many["manifests"] = {f"0.{step}": "5a" * 32 for step in range(10_000 - REMEMBERED, 10_000)}
    await read(versions, peer, many)
    await read(versions, peer, answer(ONE, run="bb"))
    assert versions.served is not None
    assert versions.served.version == ONE


async def test_schedule_of_a_version_that_was_only_listed_is_asked_for(versions: EngineVersions, peer: Peer) -> None:
    """The hub's list names a version's manifest first; its files come with the version."""
    await read(versions, peer, answer(ONE, v1=OLD))
    peer.found = answer(TWO, v1=OLD, v2=NEW)
    assert (await versions.span("0.2")).version == TWO
    assert versions.schedule(TWO) == NEW


async def test_peer_that_restarts_ends_no_play_of_a_version_with_a_known_manifest(
    versions: EngineVersions, peer: Peer
) -> None:
    await read(versions, peer, answer(ONE, v1=OLD, v2=NEW))
    peer.found = answer(None)
    assert (await versions.span("0.2")).version == TWO
    assert versions.schedule(TWO) == NEW


async def test_versions_that_were_served_are_not_asked_for_again(versions: EngineVersions, peer: Peer) -> None:
    await read(versions, peer, answer(TWO))
    await versions.span("0.2")
    await read(versions, peer, answer(ONE, sparse=False))
    await versions.span("0.2")
    await versions.span("0.1")
    assert peer.asked == 2
