"""Engines driven by an orchestrator: POST /commit at a peer, and callbacks around a switch. Real daemons, folders and
commands.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from types import SimpleNamespace

import aiohttp
import pytest

from rollout_node.engine import runner as runner_module

COMMAND = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with open(folder / "runs", "a") as runs:
    print(os.environ["P2PCAST_VERSION"], file=runs)
while not (folder / "go").exists():
    time.sleep(0.005)
sys.exit(int((folder / "status").read_text()) if (folder / "status").exists() else 0)
"""


class Command:
    """An engine's reload command: notes each run, waits for the test, and ends with a chosen exit status."""

    def __init__(self, folder) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "command.py").write_text(COMMAND)
        self.target = f"exec:{shlex.join([sys.executable, str(folder / 'command.py'), str(folder)])}"
        self.may_go()

    def may_go(self) -> None:
        (self.folder / "go").touch()

    def wait(self) -> None:
        (self.folder / "go").unlink()

    def ends_with(self, status: int) -> None:
        (self.folder / "status").write_text(str(status))

    @property
    def runs(self) -> list[str]:
        path = self.folder / "runs"
        return path.read_text().split() if path.exists() else []


@pytest.fixture
def command(tmp_path) -> Command:
    return Command(tmp_path / "command")


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_S", 0.05)


async def commit(swarm, peer, version: str, timeout_s: float = 60.0) -> tuple[int, dict]:
    code, text = await swarm.post(peer, "/commit", {"version": version, "timeout_s": timeout_s})
    return code, json.loads(text)


async def late(swarm, peer, begun) -> None:
    """A call whose time ends before its engine is ready, repeated until the engine has begun all the same."""
    async with asyncio.timeout(600):
        while not begun():
            code, answer = await commit(swarm, peer, "0.1", timeout_s=0.3)
            assert code == 504
            assert "0.1 is not live on 1 of 1 engines" in answer["error"]


async def staged(swarm, version: str, *peers) -> None:
    await swarm.until(
        lambda: all(str(r.staged) == version for p in peers for r in p.runners), f"{version} is staged in all engines"
    )


async def test_engines_are_switched_when_the_orchestrator_says_so(swarm, states, command):
    state = states.first()
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(f"safetensors:{swarm.out('a')}", command.target))
    assert (await commit(swarm, peer, "newest"))[0] == 409
    for step in (1, 2):
        swarm.publish(step, state)
        await staged(swarm, f"0.{step}", peer)
        state = states.trained(state, step)
    assert (peer.committed, command.runs) == (None, [])
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    assert {e["waits_for"] for e in (await swarm.status(peer))["engines"]} == {"commit"}
    code, answer = await commit(swarm, peer, "0.2")
    assert code == 200, answer
    assert answer["version"] == "0.2"
    assert [e["name"] for e in answer["engines"]] == [r.installer.name for r in peer.runners]
    assert answer["pause_s"] == max(e["pause_s"] for e in answer["engines"]) > 0
    swarm.check(peer, 2)
    assert str(peer.committed) == "0.2"
    swarm.publish(3, state)
    await staged(swarm, "0.3", peer)
    assert str(peer.committed) == "0.2"
    assert (await commit(swarm, peer, "0.2", timeout_s=0))[0] == 200  # in use, although a newer version is staged
    assert (await commit(swarm, peer, "newest"))[1]["version"] == "0.3"
    swarm.check(peer, 3)
    assert command.runs == ["0.2", "0.3"]
    assert (await swarm.get(peer, "/readyz"))[0] == 200


async def test_a_version_that_is_not_there_or_left_behind_is_refused_and_the_newest_named(swarm, states):
    state = states.first()
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external")
    for step in (1, 2):
        swarm.publish(step, state)
        await staged(swarm, f"0.{step}", peer)
        state = states.trained(state, step)
    for version in ("0.1", "0.3", "1.2"):
        code, answer = await commit(swarm, peer, version)
        assert (code, answer["error"]) == (409, f"version {version} is not staged here: 0.2 is")
    assert peer.committed is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"version": 2},
        {"version": "soon"},
        {"version": "0.1", "timeout_s": -1},
        {"version": "0.1", "timeout_s": 1e9},
        {"version": "0.1", "timeout_s": "5"},
        {"version": "0.1", "timeout_s": True},
        {"version": "0.1", "timeout_s": None},
    ],
)
async def test_invalid_requests_and_failures_have_different_codes(swarm, states, body):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external")
    await staged(swarm, "0.1", peer)
    assert (await swarm.post(peer, "/commit", body))[0] == 400
    assert (await swarm.post(peer, "/commit", b'{"version": "0.1", "timeout_s": NaN}'))[0] == 400
    assert peer.committed is None


async def test_repeated_calls_answer_at_once_and_concurrent_calls_share_work(swarm, states, command):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(command.target,))
    await staged(swarm, "0.1", peer)
    command.wait()
    calls = [asyncio.create_task(commit(swarm, peer, v)) for v in ("0.1", "newest", "0.1")]
    await swarm.until(
        lambda: command.runs == ["0.1"] and sum(peer.engine.requests._waiting.values()) == 3,
        "all calls wait for one run",
    )
    command.may_go()
    answers = [await c for c in calls]
    assert [code for code, _ in answers] == [200] * 3
    assert answers[0] == answers[1] == answers[2]
    assert await commit(swarm, peer, "0.1", timeout_s=0) == answers[0]
    assert command.runs == ["0.1"]


async def test_when_time_is_up_the_state_stays_true_and_the_next_call_joins_in(swarm, states, command):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(command.target,))
    await staged(swarm, "0.1", peer)
    command.wait()
    await late(swarm, peer, lambda: command.runs == ["0.1"])
    assert (peer.committed, peer.runners[0].ready) == (None, False)
    again = asyncio.create_task(commit(swarm, peer, "0.1"))
    command.may_go()
    assert (await again)[0] == 200
    assert command.runs == ["0.1"]


async def test_no_engine_starts_after_all_callers_left(swarm, states):
    """The caller has resumed the engine meanwhile: a switch now would interrupt its work."""
    swarm.publish(1, states.first())
    await swarm.hub_up()
    defers = [3600.0]
    hooks = SimpleNamespace(before_commit=lambda version: defers.pop() if defers else None)
    peer = await swarm.peer_up("a", driver="external", callbacks=hooks, max_defer_s=3600.0)
    await staged(swarm, "0.1", peer)
    runner = peer.runners[0]
    await late(swarm, peer, lambda: runner.waits_for == "before_commit")
    steps = runner.steps
    runner._deferred = (None, 0.0, 0.0)  # as if the hour had passed
    runner.wake()
    await swarm.until(lambda: runner.steps > steps, "it has had its chance")
    assert (peer.committed, runner.waits_for) == (None, "commit")
    assert (await commit(swarm, peer, "0.1"))[0] == 200


async def test_the_shadow_stays_while_a_caller_waits(swarm, states, command):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(f"safetensors:{swarm.out('a')}", command.target))
    await staged(swarm, "0.1", peer)
    command.wait()
    waiting = asyncio.create_task(commit(swarm, peer, "0.1"))
    await swarm.until(lambda: command.runs == ["0.1"], "the command runs")
    swarm.publish(2, states.trained(state, 2))
    await swarm.published("0.2")
    await swarm.until(
        lambda: any(h.finished and h.open.version.step == 2 for h in peer.node.holdings.values()), "0.2 is here"
    )
    assert str(peer.staged) == "0.1"
    command.may_go()
    assert (await waiting)[0] == 200
    swarm.check(peer, 1)
    await staged(swarm, "0.2", peer)
    assert str(peer.committed) == "0.1"


async def test_an_engine_that_rejects_a_version_is_named_at_once(swarm, states, command):
    swarm.publish(1, states.first())
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(f"safetensors:{swarm.out('a')}", command.target))
    await staged(swarm, "0.1", peer)
    command.ends_with(7)
    code, answer = await commit(swarm, peer, "0.1")
    assert code == 500
    assert "exit status 7" in answer["error"]
    assert command.target in answer["error"]
    await swarm.until(lambda: peer.runners[0].ready, "the other engine switches all the same")
    await staged(swarm, "0.1", peer)
    assert command.runs == ["0.1"]  # no second run
    command.ends_with(0)
    assert (await commit(swarm, peer, "0.1"))[0] == 200
    assert command.runs == ["0.1"] * 2


async def test_an_engine_that_is_not_there_may_come_in_time(swarm, states, tmp_path):
    """Another process holds the folder until the test releases it."""
    swarm.publish(1, states.first())
    await swarm.hub_up()
    first = await swarm.peer_up("a")
    await swarm.live("0.1", first)
    peer = await swarm.peer_up(
        "b", driver="external", targets=(f"safetensors:{swarm.out('b')}", f"safetensors:{swarm.out('a')}")
    )
    await swarm.until(
        lambda: str(peer.runners[0].staged) == "0.1" and peer.runners[1].error is not None, "one of two is there"
    )
    code, answer = await commit(swarm, peer, "0.1")
    assert code == 500
    assert "another process" in answer["error"]
    await swarm.down(first)
    await staged(swarm, "0.1", peer)
    assert (await commit(swarm, peer, "0.1"))[0] == 200


async def test_the_command_line(swarm, states, p2pcast):
    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external")
    await staged(swarm, "0.1", peer)
    folder = swarm.folder / "a"

    async def run(*words: object):
        return await asyncio.to_thread(lambda: p2pcast("commit", *words, "--state", folder))

    done = await run("0.9")
    assert (done.returncode, done.stderr.count("0.1 is")) == (3, 1)
    done = await run("0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("version 0.1 is live on 1 engines, longest pause")
    swarm.publish(2, states.trained(state, 2))
    await staged(swarm, "0.2", peer)
    done = await run("newest", "--json", "--timeout", "30")
    assert json.loads(done.stdout)["version"] == "0.2"
    swarm.check(peer, 2)
    assert (await run("soon")).returncode == 2


async def test_every_option_on_the_command_line(swarm, states, tmp_path):
    (tmp_path / "hooks_of_a_user.py").write_text(
        "class Hooks:\n"
        "    def before_commit(self, version):\n"
        "        with open('calls', 'a') as calls:\n"
        "            print('before', version, file=calls)\n"
        "        return 3600.0\n"
        "hooks = Hooks()\n"
    )
    swarm.publish(1, states.first())
    await swarm.hub_up()
    options = [
        "--driver",
        "external",
        "--rolling",
        "1",
        "--callbacks",
        "hooks_of_a_user:hooks",
        "--max-defer",
        "0.01",
        "--kv",
        "salt",
    ]
    where = [
        "--state",
        tmp_path / "x",
        "--shadow",
        swarm.tmpfs / "x",
        "--name",
        "x",
        "--listen",
        "127.0.0.1:0",
        "--plaintext",
    ]
    words = [
        "join",
        "{}:{}".format(*swarm.address),
        "--token-file",
        tmp_path / "token",
        "--install",
        f"safetensors:{swarm.out('x')}",
    ]
    command = [sys.executable, "-m", "p2pcast.cli", *words, *where, *options]
    process = await asyncio.create_subprocess_exec(*map(str, command), cwd=tmp_path)
    try:
        await swarm.until((tmp_path / "x" / "daemon.json").exists, "it has joined")
        url = json.loads((tmp_path / "x" / "daemon.json").read_text())["http"]
        headers = {"Authorization": f"Bearer {(tmp_path / 'x' / 'http.token').read_text().strip()}"}
        async with aiohttp.ClientSession() as http:
            status = 409
            async with asyncio.timeout(600):
                while status == 409:  # nothing is staged yet
                    async with http.post(f"{url}/commit", json={"version": "newest"}, headers=headers) as answer:
                        status = answer.status
                    await asyncio.sleep(0.01)
        assert status == 200
        assert states.read(swarm.out("x") / "latest") == swarm.steps[1][0]
        assert (tmp_path / "calls").read_text().splitlines() == ["before 0.1"] * 2
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_manual_commits_call_the_callbacks(swarm, states, command):
    calls: list[tuple[str, ...]] = []

    class Hooks:
        async def before_commit(self, version: str) -> float | None:
            calls.append(("before", version))
            return 0.01 if calls.count(("before", version)) < 3 else None

        def after_commit(self, version: str, error: str | None) -> None:
            calls.append(("after", version, "fine" if error is None else error))

    state = states.first()
    swarm.publish(1, state)
    await swarm.hub_up()
    peer = await swarm.peer_up("a", callbacks=Hooks(), max_defer_s=60.0)
    await swarm.live("0.1")
    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await swarm.until(lambda: ("after", "0.2", "fine") in calls, "it was told")
    expected = [c for v in ("0.1", "0.2") for c in [*[("before", v)] * 3, ("after", v, "fine")]]
    assert calls == expected
    assert peer.sync.activity.error is None
