"""The demo's parts, and the whole demo without vLLM on a tiny model: a real trainer, hub and peers."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from netem.demo.interruption import kill_in_transfer
from netem.demo.script import demo
from netem.demo.verdict import check_answers, check_folders, differences
from netem.demo.version_board import VersionBoard, VersionRow
from netem.fleet import processes as processes_module
from netem.fleet.participants import ParticipantOptions
from netem.fleet.processes import FleetError, Processes
from netem.fleet.traffic import Traffic
from netem.fleet.workspace import MARKER, Workspace
from p2pcast.ground.errors import UsageError

TINY = ("--hidden", "128", "--layers", "1", "--warmup-steps", "4")
SALTS: list[str | None] = []
"""Cache salts of the requests to the fixture ``server``."""
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def checkpoint(
    folder: Path, *, dtype: str = "BF16", name: str = "w", data: bytes = bytes(8), config: str = "{}"
) -> Path:
    folder.mkdir(parents=True)
    header = json.dumps({name: {"dtype": dtype, "shape": [len(data) // 2], "data_offsets": [0, len(data)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text(config)
    (folder / "STABLE").write_text(str(folder))  # a marker, whose text does not count
    return folder


# -- the verdict


def test_the_same_checkpoint_has_no_differences(tmp_path: Path) -> None:
    assert differences(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"data": bytes(7) + b"\1"}, "tensor w differs"),
        ({"dtype": "F16"}, "tensor w differs"),
        ({"data": bytes(10)}, "tensor w differs"),
        ({"name": "v"}, "tensor w is missing"),
        ({"config": "[]"}, "file config.json differs"),
    ],
)
def test_every_difference_is_found(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    assert any(said in line for line in differences(checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b", **other)))


def test_damaged_missing_and_empty_folders_differ(tmp_path: Path) -> None:
    good = checkpoint(tmp_path / "a")
    cut = checkpoint(tmp_path / "b")
    (cut / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-1])
    (tmp_path / "c").mkdir()
    assert differences(good, cut)
    assert differences(good, tmp_path / "nothing")
    assert differences(tmp_path / "c", tmp_path / "c"), "nothing was compared"
    (good / "extra.json").touch()
    assert differences(good, checkpoint(tmp_path / "d")) == [f"{tmp_path / 'd'}: file extra.json differs"]


def test_due_versions_must_exist_and_all_must_match(tmp_path: Path) -> None:
    trained = {step: checkpoint(tmp_path / f"t{step}", data=bytes([step, 0])) for step in (1, 2)}
    peer = tmp_path / "p1"
    checkpoint(peer / "step_1", data=bytes([1, 0]))
    assert check_folders(trained, {"p1": peer}, {"p1": {1}}).ok
    assert not check_folders(trained, {"p1": peer}, {"p1": {1, 2}}).ok
    checkpoint(peer / "step_2", data=bytes([1, 0]))
    assert not check_folders(trained, {"p1": peer}, {"p1": {1}}).ok, "not due, but wrong"
    assert not check_folders(trained, {"p1": tmp_path / "none"}, {"p1": set()}).ok, "nothing was compared"


def test_unknown_installed_version_fails_the_check(tmp_path: Path) -> None:
    checkpoint(tmp_path / "p1" / "step_1")
    checkpoint(tmp_path / "p1" / "step_7")
    found = check_folders({1: checkpoint(tmp_path / "t1")}, {"p1": tmp_path / "p1"}, {"p1": {1}})
    assert (found.ok, "step_7" in found.detail) == (False, True)


def test_answers_must_match_bitwise_and_differ_between_versions() -> None:
    def answer(logprob: float) -> list[dict[str, list[float]]]:
        return [{"tokens": [5], "logprobs": [logprob]}]

    assert check_answers({1: answer(-0.5), 2: answer(-0.25)}, {1: answer(-0.5), 2: answer(-0.25)}).ok
    off = math.nextafter(-0.25, 0)
    assert not check_answers({1: answer(-0.5), 2: answer(-0.25)}, {1: answer(-0.5), 2: answer(off)}).ok
    assert not check_answers({1: answer(-0.5), 2: answer(-0.5)}, {1: answer(-0.5), 2: answer(-0.5)}).ok
    assert not check_answers({1: answer(-0.5)}, {1: answer(-0.5)}).ok, "one version proves nothing"
    assert not check_answers({}, {}).ok


# -- folders


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for socket paths, however long pytest's own paths are."""
    with tempfile.TemporaryDirectory(prefix="p2pcast-") as folder:
        yield Path(folder)


def test_only_a_folder_of_the_demo_is_replaced(short_path: Path) -> None:
    foreign = short_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not made by the demo"):
        Workspace(foreign)
    assert (foreign / "thesis.tex").exists()
    (foreign / MARKER).touch()
    Workspace(foreign)
    assert not (foreign / "thesis.tex").exists()
    (short_path / "file").touch()
    with pytest.raises(UsageError):
        Workspace(short_path / "file")
    (short_path / "empty").mkdir()
    Workspace(short_path / "empty")


def test_the_folder_in_memory_goes_with_the_block(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "w")

    def fail() -> None:
        with work:
            (work.memory / "p1").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not work.memory.exists()
    (work.logs / "hub.log").touch()
    work.slim()
    assert sorted(p.name for p in work.root.iterdir()) == [MARKER, "logs"]


def test_a_path_too_long_for_sockets_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long"):
        Workspace(tmp_path / ("x" * 100))
    assert list(tmp_path.iterdir()) == []


# -- processes


def test_unexpected_exit_of_a_child_is_an_error_with_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as children:
        child = children.start("hub", [sys.executable, "-c", "raise SystemExit('no disk left')"])
        child.process.wait()
        with pytest.raises(FleetError, match=r"hub ended with exit code 1(?s:.*)no disk left"):
            children.check()
        child.expected = True
        children.check()


def test_stop_kills_groups_that_ignore_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "GRACE_S", 0.2)
    monkeypatch.setattr(processes_module, "ABORT_S", 600.0)
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);child = "
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); print(child.pid, flush=True); "
        "child.wait()"
    )
    with Processes(tmp_path) as children:
        child = children.start("stubborn", [sys.executable, "-c", code], output=tmp_path / "out")
        grandchild = int(wait_for(lambda: (tmp_path / "out").read_text()))
    assert child.process.returncode == -signal.SIGABRT
    wait_for(lambda: gone(grandchild))


def test_an_error_waits_less_long_for_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "BREAK_S", 0.2)
    monkeypatch.setattr(processes_module, "GRACE_S", 3600.0)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    children = Processes(tmp_path)
    child = children.start("stubborn", [sys.executable, "-c", code], output=tmp_path / "out")
    wait_for(lambda: (tmp_path / "out").read_text())
    children.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert child.process.returncode in (-signal.SIGABRT, -signal.SIGKILL)


def test_children_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    code = f"""
import signal, sys
from pathlib import Path
from netem.fleet.processes import Processes
print(Processes(Path({str(tmp_path)!r})).start("child", {SLEEPER!r}).process.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: "up" in (tmp_path / "child.log").read_text())
        parent.kill()
    wait_for(lambda: gone(pid))


def gone(pid: int) -> bool:
    """Whether the process has ended, even if its parent has not collected it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(look: Callable[[], Any]) -> Any:
    """The first true result of ``look``; the test's own time limit ends the wait."""
    while not (found := look()):
        os.sched_yield()
    return found


def test_a_peer_is_killed_only_while_an_artifact_comes_in(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    code = f"""
import signal
print("up", flush=True)
input()
open({str(tmp_path / "partial" / "abcd")!r}, "wb").write(bytes(7))
signal.pause()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        victim.stdout.readline()
        give_up = threading.Event()
        give_up.set()
        assert kill_in_transfer(victim.pid, tmp_path, give_up) is None
        assert victim.poll() is None
        print(file=victim.stdin, flush=True)
        caught = kill_in_transfer(victim.pid, tmp_path, threading.Event())
    assert victim.returncode == -signal.SIGKILL
    assert caught is not None
    assert (caught.artifact, caught.bytes_on_disk in (0, 7)) == ("abcd", True)


# -- traffic, against a server with real faults


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """Each entry of the list is the answer to one request; further answers are correct. Answers have 3 tokens."""
    manners: list[str] = []
    SALTS.clear()

    async def completions(request: web.Request) -> web.StreamResponse:
        manner = manners.pop(0) if manners else "good"
        SALTS.append((await request.json()).get("cache_salt"))
        if manner == "refused":
            return web.Response(status=500, text="out of memory")
        response = web.StreamResponse()
        await response.prepare(request)
        tokens = 2 if manner == "short" else 3
        await response.write(b'data: {"choices": [{"text": "4"}]}\n\n')
        if manner == "two pieces":
            await response.write(b'data: {"choices": [{"text": "2"}]}\n\n')
        if manner == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(
            f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': tokens}})}\n\n".encode()
        )
        if manner != "endless":
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", manners
    await runner.cleanup()


async def test_every_kind_of_failure_is_counted(server: tuple[str, list[str]]) -> None:
    url, manners = server
    manners += ["good", "refused", "cut", "short", "endless"]
    traffic = Traffic(url, clients=1, tokens=3)
    running = asyncio.create_task(traffic.run())
    while traffic.counts.ok < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    traffic.stop()
    await running
    assert traffic.counts.failed == 4
    assert traffic.counts.tokens == 3 * traffic.counts.ok + 2 + 3
    assert [line.split(":")[0] for line in traffic.counts.errors][0::2] == ["ValueError", "ValueError"]
    assert "status 500: out of memory" in traffic.counts.errors[0]


async def test_paused_clients_have_no_active_request(server: tuple[str, list[str]]) -> None:
    traffic = Traffic(server[0], clients=3, tokens=3)
    running = asyncio.create_task(traffic.run())
    while traffic.counts.ok < 5:  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with traffic.resting():
        before = traffic.counts.ok
        for _ in range(50):
            await asyncio.sleep(0)
        assert traffic.counts.ok == before
    while traffic.counts.ok == before:  # noqa: ASYNC110
        await asyncio.sleep(0)
    traffic.stop()
    await running
    assert traffic.counts.failed == 0


async def test_gaps_are_between_the_pieces_of_one_answer(server: tuple[str, list[str]]) -> None:
    """Two pieces an answer give one gap; no gap is counted between two answers, nor for the chunk without a choice."""
    url, manners = server
    manners += ["two pieces"] * 6
    traffic = Traffic(url, clients=2, tokens=3)
    running = asyncio.create_task(traffic.run())
    await traffic.ended(6)
    traffic.stop()
    await running
    assert len(traffic.gaps) == 6
    assert all(later >= earlier for _, earlier, later in traffic.gaps)
    assert {client for client, _, _ in traffic.gaps} == {0, 1}


async def test_ended_counts_failed_requests(server: tuple[str, list[str]]) -> None:
    url, manners = server
    manners += ["refused", "good"]
    traffic = Traffic(url, clients=1, tokens=3)
    running = asyncio.create_task(traffic.run())
    await traffic.ended(2)
    assert (traffic.counts.ok, traffic.counts.failed) == (1, 1)
    traffic.stop()
    await running


async def test_new_requests_carry_the_current_salt(server: tuple[str, list[str]]) -> None:
    url, _ = server
    traffic = Traffic(url, clients=1, tokens=3)
    running = asyncio.create_task(traffic.run())
    await traffic.ended(1)
    traffic.salt = "0.7"
    await traffic.ended(2)
    traffic.stop()
    await running
    assert SALTS[0] is None
    assert SALTS[-1] == "0.7"


# -- the display


def board() -> tuple[VersionBoard, io.StringIO]:
    out = io.StringIO()
    return VersionBoard(Console(file=out, width=300)), out


def test_plain_output_has_a_line_a_version() -> None:
    shown, out = board()
    row = VersionRow("0.3", 20_000, 3_200_000, 8_000, 1_000_000, 0.01, 0.25, 0.0125, 40, 0.93)
    with shown:
        shown.phase("broadcasting")
        shown.version(row)
        shown.refresh()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert (
        "version 0.3: delta 20.0 kB, 160 x smaller than dense, 0.80% of the values changed, at the last peer after "
        "250 ms" in lines[1]
    )


def test_a_terminal_gets_a_table() -> None:
    out = io.StringIO()
    shown = VersionBoard(Console(file=out, force_terminal=True, width=120))
    with shown:
        shown.view.peers = [
            {"name": "p1", "parent": "hub", "committed": "0.1", "progress": {"version": "0.2", "pieces": 0, "of": 1}}
        ]
        shown.view.down = {"p2"}
        shown.version(VersionRow("0.1", 20_000, 3_200_000, 8_000, 1_000_000, 0.01, None, None, None, None))
    assert all(text in out.getvalue() for text in ("to last peer", "0.2 0/1", "killed"))


# -- the whole demo


def test_the_demo_without_vllm(tmp_path: Path) -> None:
    shown, out = board()
    options = ParticipantOptions(tmp_path / "d", versions=5, peers=3, vllm=False, keep=True, pace_s=0.0, trainer=TINY)
    result = demo(options, shown)
    assert result["verdict"] == "PASS without vLLM", result["checks"]
    assert [row["version"] for row in result["versions"]] == [f"0.{step}" for step in range(1, 6)]
    assert result["kill"]["peer"] != "p1"
    assert result["kill"]["rejoined_at"] is not None
    assert json.loads((tmp_path / "d" / "result.json").read_text()) == result
    assert len(re.findall(r"version 0\.\d+: delta", out.getvalue())) == 5
    assert not [
        p for p in Path("/dev/shm").glob(f"p2pcast-demo-{os.getuid()}-*") if p == Workspace(tmp_path / "d").memory
    ]


def test_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from netem.demo import script
from netem.fleet import participants
work = Path({str(tmp_path / "d")!r})
tiny = participants.ParticipantOptions(work, versions=1000, peers=3, vllm=False, trainer={TINY!r})
from netem.demo.version_board import VersionBoard
from rich.console import Console
try:
    script.demo(tiny, VersionBoard(Console(width=200)))
except KeyboardInterrupt:
    sys.exit(130)
"""
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "version 0.2" not in process.stdout.readline():
            assert process.poll() is None
        pids = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(pids) >= 5, "trainer, hub, three peers"
        process.terminate()
        process.stdout.read()
    assert process.returncode == 130
    assert all(gone(pid) for pid in pids)
    assert not Workspace(tmp_path / "d").memory.exists()
