"""Faults in a real vLLM server at tensor parallel 2. While the server lives, they must cause neither an answer from
mixed weights nor a failed request. The page docs/design/faults.md tells the effects.

Every test begins with version 0.0 and continues to the same 0.1 and 0.2. Expected answers come from the same server
with weights loaded by vLLM itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from real_server import Server, one_off_connections
from shared_engine import (
    FIRST,
    PATIENT,
    SECOND,
    THIRD,
    Faults,
    Peer,
    Truth,
    advance,
    answers,
    asking,
    installs,
    paused,
    unmixed,
)

from p2pcast.ground.errors import IntegrityError, P2PCastError, RetryableError
from rollout_node.installers.engine_server import Deadlines

pytestmark = pytest.mark.vllm

STEPS = ("pause", "commit", "label", "resume")
"""Steps of a switch over vLLM's routes, each a command of its own."""


def cases(sample: str, *others: str) -> list[Any]:
    """``make test`` runs the sample alone, ``make prove`` all."""
    return [sample, *(pytest.param(other, marks=pytest.mark.prove) for other in others)]


@pytest.mark.parametrize("fault", cases("prepare-raises", "prepare-hangs", "lost-prepare"))
async def test_failed_prepare_keeps_the_old_version(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str
) -> None:
    """No weight is written; the engine continues with the old version, unready, and accepts the next one."""
    digests = run.digests
    advance(run)
    faults.make(fault)
    faults.make("hold")
    peer.hurry()
    async with asking(server) as client:
        with pytest.raises(P2PCastError):
            await peer.installer.stage(run.version, run.shadow.path)
        assert (peer.installer.ready, peer.installer.committed) == (False, FIRST)
        assert not await paused(server)
    assert await unmixed(server, client, truth[0]) == 0
    peer.hurry(PATIENT)
    assert await peer.holds(FIRST, digests)
    advance(run)
    async with asking(server) as client:
        await peer.install()  # while the earlier prepare still hangs
        faults.end("hold")  # the held prepare ends late, without effect
    assert peer.installer.ready
    assert await unmixed(server, client, truth[0], truth[2]) <= 1
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]
    assert faults.pending == []


@pytest.mark.parametrize("fault", cases("commit-halfway", "commit-raises", "commit-writes-nothing", "lost-commit"))
async def test_failed_commit_is_rolled_back_on_all_ranks(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str
) -> None:
    """All ranks restore their old values and report it; the engine continues with these."""
    digests = run.digests
    advance(run)
    peer.hurry(Deadlines(report=3))
    await peer.installer.stage(run.version, run.shadow.path)
    faults.make(fault)
    async with asking(server) as client:
        with pytest.raises(P2PCastError):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, FIRST)
        assert not await paused(server)
    assert await unmixed(server, client, truth[0]) <= 1
    assert await peer.holds(FIRST, digests)
    assert await answers(server) == truth[0]
    advance(run)
    await peer.install()
    assert peer.installer.ready
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]
    assert faults.pending == []


async def test_hanging_commit_ends_on_one_version(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth
) -> None:
    """The engine is unready and answers no request until the rank wakes up; then all ranks end on one version."""
    advance(run)
    await peer.installer.stage(run.version, run.shadow.path)
    peer.hurry()
    faults.make("commit-hangs")
    faults.make("hold")
    async with asking(server) as client:
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        before = len(client.answers)
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.installer.check()
        with pytest.raises(RetryableError, match="no answer within"):
            await peer.install()
        assert len(client.answers) == before
        advance(run)
        faults.end("hold")
        peer.hurry(PATIENT)
        await peer.install_with_retries()
        assert not await paused(server)
    assert peer.installer.ready
    await unmixed(server, client, *truth)
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]


async def test_false_proof_is_followed_by_a_whole_install(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth
) -> None:
    """The rank reports the version, has written nothing, and can't undo it: only an install of the whole state
    helps.
    """
    advance(run)
    await peer.installer.stage(run.version, run.shadow.path)
    faults.make("commit-lies")
    async with asking(server) as client:
        with pytest.raises(IntegrityError, match=r"rank 1 says that it holds 0\.1"):
            await peer.installer.commit(run.version)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        assert await paused(server)
        await peer.install()
        assert not await paused(server)
    assert installs(run)[-2:] == ["dense", "dense"]
    assert await unmixed(server, client, *truth[:2]) <= 1
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]


@pytest.mark.parametrize("fault", cases("columns-rot", "rows-rot", "rot-before-audit"))
async def test_foreign_weight_changes_are_detected_and_overwritten(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, fault: str
) -> None:
    """Detected by the rank, by the sum over ranks, or by an audit: the engine is paused and written whole."""
    digests = run.digests
    advance(run)
    faults.make(fault)
    if fault == "rot-before-audit":
        found = await peer.installer.audit(run.layout, digests)
        assert found.wrong
        assert all("down_proj" in name for name in found.wrong)
        assert (peer.installer.ready, peer.installer.committed) == (False, None)
        assert await paused(server)
    await peer.install()
    assert not await paused(server)
    assert installs(run)[-2:] == ["dense", "dense"]
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]
    assert faults.pending == []


@pytest.mark.parametrize("last", cases("half a switch", "prepare", "switch", *STEPS, "half a commit"))
async def test_successor_of_a_vanished_peer_continues(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth, last: str
) -> None:
    """``last``: the peer's last completed step. Its successor finds the engine's state, resumes or repairs it, and
    continues.
    """
    advance(run)
    if last.startswith("half"):
        faults.make("commit-raises")
    async with asking(server) as client:
        with gone_after(peer, last):
            await peer.installer.stage(run.version, run.shadow.path)
            if last != "prepare":
                with contextlib.suppress(P2PCastError):
                    await peer.installer.commit(run.version)
        await peer.vanish()
        assert await paused(server) == (last in ("pause", "commit", "label") or last.startswith("half"))
        await peer.come_back()
        await peer.install()
        assert not await paused(server)
        repaired = ["dense"] if last.startswith("half") else []
        expected = ["sparse"] if last in ("prepare", "pause") else repaired
        assert installs(run)[::2] == ["dense", "sparse", *expected]
    assert await unmixed(server, client, *truth[:2]) <= 2
    assert await peer.holds(SECOND, run.digests)
    assert await answers(server) == truth[1]
    advance(run)
    await peer.install()
    assert await peer.holds(THIRD, run.digests)


@contextlib.contextmanager
def gone_after(peer: Peer, last: str) -> Iterator[None]:
    """Block every request to the server after ``last``; after "switch", block its answer to the peer, too."""
    server = peer.installer._server
    if last in (*STEPS, "half a commit"):
        peer.installer._machine._in_core = lambda reports: False  # type: ignore[method-assign]
    pause, update, label, resume, finish = server.pause, server.update, server.set_label, server.resume, server.finish

    def then_gone(real: Any) -> Any:
        async def done(*args: Any, **more: Any) -> None:
            await real(*args, **more)
            await server.close()

        return done

    async def commit(info: dict[str, Any], deadline_s: float) -> None:
        if info["phase"] == "abort":
            await server.close()
        await update(info, deadline_s)
        if info["phase"] == "commit" and last == "commit":
            await server.close()

    switch = server.switch

    async def unheard(order: dict[str, Any], deadline_s: float) -> Any:
        await switch(order, deadline_s)
        await server.close()
        raise RetryableError("the peer is gone before the answer arrives")

    server.update = commit  # type: ignore[method-assign]
    if last == "switch":
        server.switch = unheard  # type: ignore[method-assign]
    if last == "pause":
        server.pause = then_gone(pause)  # type: ignore[method-assign]
    if last == "label":
        server.set_label = then_gone(label)  # type: ignore[method-assign]
    if last == "resume":
        server.resume = then_gone(resume)  # type: ignore[method-assign]
    yield
    server.pause, server.update, server.set_label = pause, update, label  # type: ignore[method-assign]
    server.resume, server.finish = resume, finish  # type: ignore[method-assign]


async def order(http: aiohttp.ClientSession, server: Server, what: str) -> None:
    """A command from a client other than p2pcast."""
    async with http.post(f"{server.url}/{what}") as answer:
        assert answer.status == 200, await answer.text()


async def test_foreign_pause_is_left_in_place(server: Server, run: Any, peer: Peer, truth: Truth) -> None:
    advance(run)
    async with one_off_connections() as http:
        await order(http, server, "pause?mode=keep&clear_cache=false")
        await peer.install()
        assert await paused(server)
        await peer.vanish()
        await peer.come_back()
        await peer.install()
        assert await paused(server)
        await order(http, server, "resume")
    assert await answers(server) == truth[1]


async def test_external_driver_is_never_paused_or_resumed(
    server: Server, run: Any, peer: Peer, faults: Faults, truth: Truth
) -> None:
    """With ``driver="external"`` p2pcast never pauses or resumes, also for a dense install and after a failure."""
    await peer.vanish()
    for path in (run.folder / "patches").iterdir():
        path.unlink()
    run.chain.clear()  # without the deltas, the next version is installed whole
    advance(run)
    run.chain.clear()
    await peer.come_back(driver="external")
    installer = peer.installer
    async with one_off_connections() as http:
        async with asking(server) as client:
            await installer.stage(run.version, run.shadow.path)
            assert installer.commit_needs_shadow
            assert not await paused(server)
            with pytest.raises(RetryableError, match="not paused"):
                await installer.commit(run.version)
            await order(http, server, "pause?mode=keep&clear_cache=false")
            report = await installer.commit(run.version)
            assert report.dense
            assert (installer.ready, installer.committed, installer.commit_needs_shadow) == (True, SECOND, False)
            assert await paused(server)
            await order(http, server, "resume")
        assert await unmixed(server, client, *truth[:2]) <= 1
        advance(run)
        async with asking(server) as client:
            await installer.stage(run.version, run.shadow.path)
            assert not installer.commit_needs_shadow
            await order(http, server, "pause?mode=keep&clear_cache=false")
            faults.make("commit-raises")
            with pytest.raises(P2PCastError):
                await installer.commit(run.version)
            assert (installer.ready, installer.committed) == (False, SECOND)
            assert await paused(server)
            await installer.stage(run.version, run.shadow.path)
            await installer.commit(run.version)
            assert await paused(server)
            await order(http, server, "resume")
        assert await unmixed(server, client, *truth[1:]) <= 1
    assert await peer.holds(THIRD, run.digests)
    assert await answers(server) == truth[2]
