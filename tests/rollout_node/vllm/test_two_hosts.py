"""One vLLM server at tensor parallel 2 whose two workers reach two different peers, as on two hosts: a real hub, a lead and a member as processes.

The second worker is given the member's socket by ``faults/sitecustomize.py``. At every version the engine's own weights are audited in place; an engine fresh
from the last one says what the answers must be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from real_server import PROMPTS, TOKENS, TWO_RANKS, Server, fresh, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VERSIONS = 10
DEADLINE_S = 180.0
POLL_S = 0.05
HELD_S = 1.0


def advance(run: Any) -> None:
    run.step(run.version.step + 1, share=0.05, bits=0x0180)


class Fleet:
    """A hub, a lead and a member on one machine; ``lead`` and ``member`` are also the names of their folders."""

    def __init__(self, folder: Path, tmpfs: Path, folders: list[Path]) -> None:
        self.folder, self._tmpfs, self.folders = folder, tmpfs, folders
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.server: Server = None  # type: ignore[assignment]  # once server_up() was called

    def start(self, name: str, *words: object) -> None:
        state = ["--state", self.folder / name, "--shadow", self._tmpfs / name, "--http", "127.0.0.1:0", "--plaintext"]
        command = [sys.executable, "-m", "p2pcast.cli", *words, *state]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([str(w) for w in command], stdout=log, stderr=log)

    def hub_up(self) -> None:
        self.start("hub", "seed", self.checkpoints, "--listen", "127.0.0.1:0", "--token-file", self.folder / "token")
        self.until(lambda: "listening on" in self.log("hub") and (self.folder / "token").exists(), "the hub is up")

    def join(self, name: str, *words: object) -> None:
        hub = (self.folder / "hub.log").read_text().split("listening on ")[1].split(",")[0]
        where = ["--listen", "127.0.0.1:0", "--name", name, "--token-file", self.folder / "token"]
        self.start(name, "join", hub, *where, "--engine", "big", *words)

    def lead_up(self) -> None:
        self.join("lead", "--role", "lead", "--install", f"vllm:{self.server.url}")

    def member_up(self) -> None:
        self.join("member", "--role", "member")

    def server_up(self, model: Path) -> None:
        for name in ("lead", "faults"):
            (self.folder / name).mkdir(0o700)
        paths = [str(Path(__file__).with_name("faults")), os.environ.get("PYTHONPATH", "")]
        environment = {
            **TWO_RANKS,
            "P2PCAST_TEST_FAULTS": str(self.folder / "faults"),
            "PYTHONPATH": ":".join(filter(None, paths)),
        }
        environment |= {"P2PCAST_TEST_SOCK_1": str(self.folder / "member" / "install.sock")}
        self.server = Server(model, self.folder / "lead", "--tensor-parallel-size", "2", environment=environment)

    def kill(self, name: str) -> None:
        """Without a word, as when a machine is lost."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait(30)
        (self.folder / name / "daemon.json").unlink()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)
        if self.server is not None:
            self.server.stop()

    def publish(self, step: int) -> None:
        part = self.folder / f"part-{step}"
        shutil.copytree(self.folders[step], part)
        part.rename(self.checkpoints / f"step_{step}")

    def ask(self, name: str, path: str, body: Any = None) -> dict[str, Any]:
        url = json.loads((self.folder / name / "daemon.json").read_text())["http"]
        data = None if body is None else json.dumps(body).encode()
        token = (self.folder / name / "http.token").read_text().strip()
        request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=200) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def status(self, name: str) -> dict[str, Any]:
        try:
            return self.ask(name, "/status")
        except (OSError, urllib.error.URLError):
            return {"engine": None, "engines": []}

    def engine(self) -> dict[str, Any]:
        """The lead's own row of it."""
        rows = self.status("lead")["engines"]
        return dict(rows[0]) if rows else {"ready": False, "committed": None, "error": None}

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {self.log(name)}"
            assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}; {self.log('lead')}; {self.log('member')}"
            time.sleep(POLL_S)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text()[-2000:] if path.exists() else ""

    def live(self, step: int) -> None:
        """At both peers; then every worker's own weights are digested where they lie."""
        self.until(lambda: (e := self.engine())["ready"] and e["committed"] == f"0.{step}", f"0.{step} is live")
        self.until(lambda: (self.status("member")["engine"] or {}).get("serves") == f"0.{step}", f"the member knows of 0.{step}")
        audit = self.ask("lead", "/verify", {})
        assert audit["ok"], audit
        (found,) = audit["engines"]
        assert (found["version"], found["wrong"], found["unknown"]) == (f"0.{step}", [], [])

    def paused(self) -> bool:
        with urllib.request.urlopen(self.server.url + "/is_paused", timeout=200) as answer:
            return bool(json.load(answer)["is_paused"])

    def answers(self) -> list[str]:
        return [self._complete(prompt) for prompt in PROMPTS]

    def _complete(self, prompt: str) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=200) as answer:
            return str(json.load(answer)["choices"][0]["text"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, read_versions: Any) -> Iterator[Fleet]:
    """Everything is up, and nothing is published yet."""
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("hosts")
    model = make_model(folder / "model")
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs:
        found = Fleet(folder, Path(tmpfs), read_versions(model, folder, advance, VERSIONS))
        try:
            found.server_up(model)
            found.hub_up()
            found.member_up()
            found.lead_up()
            yield found
        finally:
            found.end()


def test_an_engine_on_two_hosts_lives_through_the_loss_of_either(fleet: Fleet) -> None:
    # The member's workers get what their own peer has: versions land on both hosts, the first whole, the others as changes.
    for step in range(5):
        fleet.publish(step)
        fleet.live(step)
    lead, member = fleet.status("lead")["engine"], fleet.status("member")["engine"]
    assert [(m["name"], m["ranks"], m["staged"]) for m in lead["members"]] == [("member", [1], "0.4")]
    assert (member["role"], member["connected"], member["ready"], member["lead"]["node"]) == (
        "member", True, True, fleet.status("lead")["node"],
    )  # fmt: skip
    answers = fleet.answers()

    # A member that is killed: the engine goes on with the version that it has, and gets the next when the member is back.
    fleet.kill("member")
    fleet.publish(5)
    fleet.until(lambda: "member member is gone" in str(fleet.engine()["error"]), "the lead misses its member")
    assert fleet.engine()["committed"] == "0.4"
    assert fleet.answers() == answers
    fleet.member_up()
    fleet.live(5)

    # Killed while its worker prepares.
    (fleet.folder / "faults" / "hold.1").touch()
    (fleet.folder / "faults" / "prepare-hangs.1").touch()
    fleet.publish(6)
    fleet.until(lambda: not (fleet.folder / "faults" / "prepare-hangs.1").exists(), "the worker prepares")
    fleet.kill("member")
    fleet.until(lambda: "was lost before all was reported" in str(fleet.engine()["error"]), "the lead gives up")
    (fleet.folder / "faults" / "hold.1").unlink()
    fleet.member_up()
    fleet.live(6)

    # Killed while its worker commits: nobody is answered before the engine core knows what both ranks hold, and for that it needs no peer.
    (fleet.folder / "faults" / "hold.1").touch()
    (fleet.folder / "faults" / "commit-hangs.1").touch()
    fleet.publish(7)
    fleet.until(lambda: not (fleet.folder / "faults" / "commit-hangs.1").exists(), "the worker commits")
    fleet.kill("member")
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(fleet.answers)
        time.sleep(HELD_S)
        assert not asked.done()
        assert fleet.engine()["committed"] == "0.6"
        (fleet.folder / "faults" / "hold.1").unlink()
        assert asked.result() != answers
    fleet.until(lambda: fleet.engine()["committed"] == "0.7", "0.7 is live without the member")
    fleet.member_up()
    fleet.live(7)
    assert not fleet.paused()

    # The lead is killed and comes back at another port: the hub tells the member where.
    before = fleet.status("member")["engine"]["lead"]
    fleet.kill("lead")
    fleet.lead_up()
    fleet.publish(8)
    fleet.live(8)
    after = fleet.status("member")["engine"]["lead"]
    assert (after["node"], after["address"] != before["address"]) == (before["node"], True)

    fleet.publish(9)
    fleet.live(9)
    (expected,) = fresh([fleet.folders[9]], PROMPTS, tensor_parallel=2)
    assert fleet.answers() == expected
    assert expected != answers


def test_a_second_lead_is_refused(fleet: Fleet) -> None:
    hub = (fleet.folder / "hub.log").read_text().split("listening on ")[1].split(",")[0]
    words = ["join", hub, "--plaintext", "--token-file", fleet.folder / "token", "--listen", "127.0.0.1:0", "--name", "usurper"]
    words += ["--state", fleet.folder / "usurper", "--shadow", fleet.folder / "shadow", "--engine", "big", "--role", "lead"]
    command = [sys.executable, "-m", "p2pcast.cli", *map(str, words), "--install", "vllm:http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3
    assert "engine big has a lead already" in done.stderr
