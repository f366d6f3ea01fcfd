"""``p2pcast work`` as a process, with a certificate from a real hub and a ledger over https."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from unknown_nodes import token_for, working

sys.path.append(str(Path(__file__).parents[2] / "p2pcast" / "tasks"))

from scripted_sampler import jobs_of

from p2pcast.tasks.sums import Sums
from tests.support.fake_engine import FakeEngine, engine
from tests.support.memory_ledger import MemoryLedger

__all__ = ["engine"]
END_S = 600.0


@contextlib.asynccontextmanager
async def serving(certificate) -> AsyncIterator[MemoryLedger]:
    ledger = MemoryLedger()
    ledger.run = certificate.who.run
    await ledger.start(certificate.tls.server)
    yield ledger
    await ledger.stop()


async def work(swarm, ledger: MemoryLedger, engine: FakeEngine, *more: str) -> tuple[int | None, str]:
    """Exit code, and what the process said."""
    host, port = swarm.address
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", "work", ledger.url, "--hub", f"{host}:{port}"),
        *("--engine", engine.url, "--peer", engine.url.removeprefix("http://"), "--task", "sums", "--name", "w"),
        *("--state", str(swarm.folder / "worker"), *more),
        env=os.environ | {"P2PCAST_LEDGER_TOKEN": "unused"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(END_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()


async def token_file(swarm, hub, role: str) -> str:
    path = swarm.folder / f"{role}.join"
    path.write_text(str(await token_for(hub, role)))
    return str(path)


def last_line(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("p2pcast: ")]
    return line


async def test_a_worker_plays_a_run_over_https_and_starts_again_without_its_token(tls, engine):
    hub = await tls.hub_up()
    jobs = [replace(job, job=(n + 1).to_bytes(16, "big")) for n, job in enumerate(jobs_of(Sums(), 12))]
    async with serving(await working(tls, await token_for(hub, "ledger"), "ledger", "l")) as ledger:
        ledger.finish_when_empty = True
        ledger.add(jobs[:6])
        code, said = await work(tls, ledger, engine, "--token-file", await token_file(tls, hub, "worker"))
        assert code == 0, said
        ledger.add(jobs[6:])
        await tls.down(hub)
        code, said = await work(tls, ledger, engine)
        assert code == 0, said
        assert set(ledger.settled) == {job.job for job in jobs}
        assert len({(who.node, who.role) for who in ledger.callers}) == 1


async def test_a_peers_token_is_refused_in_one_line(tls, engine):
    hub = await tls.hub_up()
    async with serving(await working(tls, await token_for(hub, "ledger"), "ledger", "l")) as ledger:
        code, said = await work(tls, ledger, engine, "--token-file", await token_file(tls, hub, "peer"))
    assert code == 3
    assert "this token admits as peer, not as worker" in last_line(said)
    assert "--role worker" in last_line(said)
    assert ledger.callers == []


async def test_an_impostor_of_the_ledger_gets_no_request_and_one_line(tls, engine):
    """A worker's own certificate, shown by a server at the ledger's address."""
    hub = await tls.hub_up()
    async with serving(await working(tls, await token_for(hub, "worker"), "worker", "thief")) as thief:
        code, said = await work(tls, thief, engine, "--token-file", await token_file(tls, hub, "worker"))
        assert thief.callers == []
        assert thief.registrations == []
    assert code == 3
    assert "is not a server's" in last_line(said)


async def test_an_evicted_worker_ends_with_the_reason(tls, engine):
    hub = await tls.hub_up()
    async with serving(await working(tls, await token_for(hub, "ledger"), "ledger", "l")) as ledger:
        ledger.finish_when_empty = True
        file = await token_file(tls, hub, "worker")
        assert (await work(tls, ledger, engine, "--token-file", file))[0] == 0
        ledger.evicted.add(ledger.callers[0].node)
        code, said = await work(tls, ledger, engine)
    assert (code, "evicted" in last_line(said)) == (3, True)
