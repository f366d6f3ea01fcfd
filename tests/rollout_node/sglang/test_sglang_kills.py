"""A real SGLang server at tensor parallel 2, its peer, or one of its ranks is killed while a version is prepared,
committed or audited. The next server or peer serves the newest version, and no answer is of mixed weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import psutil
import pytest
from live_run import DEADLINE_S, Clients, LiveRun, live_run
from real_server import make_model, one_off_connections
from real_sglang import SglangServer, generate

pytestmark = pytest.mark.prove  # test_sglang_server.py is the sample
PROMPT = [100, 200, 300, 400]
TOKENS = 12
PHASES = ["prepare", "commit", "audit"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("kills")
    (folder / "faults").mkdir()
    faults = {"P2PCAST_TEST_FAULTS": str(folder / "faults")}
    with live_run(folder, make_model(folder / "model"), faults) as found:
        yield found


class Truth:
    """Greedy answers of verified versions."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self.by_version: dict[str, list[int]] = {}

    async def learn(self) -> None:
        """Of the newest version, once all its weights are verified."""
        await asyncio.to_thread(self._run.live)
        await asyncio.to_thread(self._run.verified)
        async with one_off_connections() as http:
            answer = await generate(http, self._run.server.url, PROMPT, tokens=TOKENS)
        self.by_version[self._run.version] = answer["output_ids"]

    def judge(self, client: Clients) -> None:
        """An answer that one version made is that version's. Labels are exact, since requests are recomputed. A server
        that has just started says that its weights are no version's.
        """
        for _, tokens, made_by in client.answers:
            assert len(tokens) == TOKENS
            assert set(made_by) <= {"none", *self.by_version}
            if len(made_by) == 1 and made_by != ["none"]:
                assert tokens == self.by_version[made_by[0]]


def kill_rank(server: SglangServer) -> None:
    """The process of rank 1."""
    [rank] = [
        p
        for p in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler_TP1" in " ".join(p.cmdline())
    ]
    rank.kill()


@pytest.mark.parametrize("victim", ["engine", "peer", "rank"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_kill_at_each_phase(run: LiveRun, phase: str, victim: str) -> None:
    server, faults = run.server, run.folder / "faults"
    truth = Truth(run)
    await truth.learn()
    client = Clients(server.url, [PROMPT], TOKENS)  # one, so that its batches are the truth's
    asking = asyncio.create_task(client.run())
    (faults / "hold.1").touch()
    (faults / f"{phase}-hangs.1").touch()
    audit: threading.Thread | None = None
    if phase == "audit":
        audit = threading.Thread(target=run.verify)
        audit.start()
    else:
        await asyncio.to_thread(run.publish)
    await asyncio.to_thread(run.until, "the rank hangs", lambda: not (faults / f"{phase}-hangs.1").exists())
    client.failing = victim != "peer"
    if victim == "peer":
        run.kill_peer()
    elif victim == "engine":
        server.kill()
    else:
        kill_rank(server)
    (faults / "hold.1").unlink()
    if audit is not None:
        await asyncio.to_thread(audit.join, DEADLINE_S)
    if victim == "peer":
        run.peer_up()
    else:
        await asyncio.to_thread(server.ended)
        server.start()
        await asyncio.to_thread(server.wait)
    await truth.learn()
    client.failing, answered = False, len(client.answers)
    await asyncio.to_thread(run.until, "a whole answer", lambda: len(client.answers) > answered)
    client.stop()
    await asking
    truth.judge(client)
    assert not client.failed or victim != "peer"
