"""Commands to the ranks of a played engine, and what their reports say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from installer_host import ONE, TWO, Host

from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from rollout_node.installers import rank_reports
from rollout_node.installers.install_instructions import common_version, raise_first
from rollout_node.installers.install_state import ServerAwayError


async def test_every_rank_reports_its_version(host: Host) -> None:
    await host.installed()
    reports = await host.ranks().init()
    assert [(r["rank"], r["held"], r["open"]) for r in reports] == [(0, "0.1", False), (1, "0.1", False)]
    assert host.engine.take_calls() == []


async def test_ranks_note_a_pause_and_forget_their_version_on_command(host: Host) -> None:
    await host.installed()
    ranks = host.ranks()
    await ranks.init(pausing=True)
    reports = await ranks.init(forget=True)
    assert host.engine.take_calls() == ["note a pause", "forget"]
    assert [r["held"] for r in reports] == [None, None]
    assert [rank.pausing for rank in host.engine.ranks] == [True, True]


async def test_a_command_reaches_all_ranks(host: Host) -> None:
    ranks = host.ranks()
    await ranks.init()
    reports = await ranks.command("prepare", ONE, 5.0, whole=True)
    assert host.engine.take_calls() == ["prepare whole"]
    assert [(r["rank"], r["phase"], r["install"]) for r in reports] == [
        (0, "prepare", "dense"),
        (1, "prepare", "dense"),
    ]


@pytest.mark.parametrize("other", [{"nonce": "0"}, {"engine": "0"}, {"version": "0.1"}, {"phase": "commit"}])
async def test_a_report_on_another_command_does_not_count(host: Host, other: dict[str, Any]) -> None:
    ranks = host.ranks()
    await ranks.init()
    host.engine.ranks[1].answers["abort"] = other
    with pytest.raises(RetryableError, match=r"e: 1 of 2 workers did not report abort within 0\.05 s, ranks 1;"):
        await ranks.command("abort", TWO, 5.0)


async def test_dead_ranks_are_not_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reports, "WATCH_S", 0.01)
    ranks = host.ranks()
    await ranks.init()
    host.engine.ranks[1].silent |= {"prepare"}
    preparing = asyncio.create_task(ranks.command("prepare", TWO, 3600.0))
    await asyncio.sleep(0.1)
    assert not preparing.done()
    host.servers[-1].url = "http://127.0.0.1:1"
    with pytest.raises(ServerAwayError, match="is the server up"):
        await preparing


async def test_a_slow_server_does_not_end_the_wait_for_reports(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reports, "WATCH_S", 0.01)
    ranks = host.ranks()
    await ranks.init()
    host.engine.ranks[1].silent |= {"prepare"}
    host.engine.fails.add("weight_info")
    with pytest.raises(RetryableError, match=r"did not report prepare within 0\.2 s"):
        await ranks.command("prepare", TWO, 0.2)


async def test_a_report_in_the_background_may_take_as_long_as_its_command(host: Host) -> None:
    """Ranks prepare in a thread, after the server has answered."""
    ranks = host.ranks()
    await ranks.init()
    host.engine.ranks[1].silent |= {"prepare", "commit"}
    with pytest.raises(RetryableError, match=r"did not report prepare within 0\.1 s"):
        await ranks.command("prepare", TWO, 0.1)
    with pytest.raises(RetryableError, match=r"did not report commit within 0\.05 s"):
        await ranks.command("commit", TWO, 10.0)


async def test_ranks_are_counted_by_the_server_unless_a_number_is_given(host: Host) -> None:
    counted, given = host.ranks(None), host.ranks(1)
    assert (counted.count, given.count) == (1, 1)
    await counted.recount()
    await given.recount()
    assert (counted.count, given.count) == (2, 1)


def report(rank: int, error: str | None = None, kind: str | None = None) -> dict[str, Any]:
    return {"rank": rank, "error": error, "kind": kind}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (IntegrityError.wire_code, IntegrityError),
        (RetryableError.wire_code, RetryableError),
        (LocalError.wire_code, LocalError),
        (None, LocalError),
        ("unknown", LocalError),
    ],
)
def test_the_first_error_is_raised_as_the_kind_that_the_rank_named(kind: str | None, found: type[P2PCastError]) -> None:
    with pytest.raises(P2PCastError) as raised:
        raise_first("e", [report(0), report(1, "full", kind), report(2, "other", "integrity")], "prepare")
    assert (type(raised.value), str(raised.value)) == (found, "e: rank 1, prepare: full")


def test_reports_without_errors_raise_nothing() -> None:
    raise_first("e", [report(0), report(1)], "prepare")


@pytest.mark.parametrize(
    ("held", "found"),
    [([], None), ([None, None], None), (["0.1", "0.1"], ONE), (["0.1", "0.2"], None), (["0.1", None], None)],
)
def test_a_version_is_common_if_held_by_every_rank(held: list[str | None], found: Any) -> None:
    assert common_version([{"held": each} for each in held]) == found
