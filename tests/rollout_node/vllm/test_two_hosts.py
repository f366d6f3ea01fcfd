"""One vLLM server at tensor parallel 2 whose two workers reach two different peers, as on two hosts.

A real hub, a lead and a member run as processes; ``faults/sitecustomize.py`` gives the second worker the member's
socket. At every version the engine's own weights are audited in place; expected answers come from the same server with
weights loaded by vLLM itself.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft_folders import config, matrices, save
from real_server import PROMPTS, TOKENS, TWO_RANKS, Server, loaded, make_model

from tests.support.until import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.prove]  # tests/daemons/engines/test_hosts.py is the sample

VERSIONS = 8
COMPARED = 3
"""The step whose answers are compared with ``reference``, those after vLLM's own loader."""
DEADLINE_S = 600.0
HELD_S = 1.0


def advance(run: Any) -> None:
    run.step(run.version.step + 1, share=0.05, bits=0x0180)


class Fleet:
    """A hub, a lead and a member on one machine; ``lead`` and ``member`` are also the names of their folders."""

    def __init__(self, folder: Path, tmpfs: Path, folders: list[Path]) -> None:
        self.folder, self._tmpfs, self.folders = folder, tmpfs, folders
        self.step = -1
        self.reference: list[str] = []
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

    def server_up(self, model: Path, *options: str) -> None:
        for name in ("lead", "faults"):
            (self.folder / name).mkdir(0o700)
        paths = [str(Path(__file__).with_name("faults")), os.environ.get("PYTHONPATH", "")]
        environment = {
            **TWO_RANKS,
            "P2PCAST_TEST_FAULTS": str(self.folder / "faults"),
            "PYTHONPATH": ":".join(filter(None, paths)),
        }
        environment |= {
            "P2PCAST_TEST_SOCK_1": str(self.folder / "member" / "install.sock"),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }
        words = ["--tensor-parallel-size", "2", *options]
        self.server = Server(model, self.folder / "lead", *words, environment=environment)

    def kill(self, name: str) -> None:
        """Kill the process without notice, as when a machine is lost."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait(600)
        (self.folder / name / "daemon.json").unlink()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(DEADLINE_S)
        if self.server is not None:
            self.server.stop()

    def publish(self) -> None:
        """Publish the next version; ``step`` is its number."""
        self.step += 1
        part = self.folder / f"part-{self.step}"
        shutil.copytree(self.folders[self.step], part)
        part.rename(self.checkpoints / f"step_{self.step}")

    def next_live(self) -> None:
        self.publish()
        self.live()

    def ask(self, name: str, path: str, body: Any = None) -> dict[str, Any]:
        url = json.loads((self.folder / name / "daemon.json").read_text())["http"]
        data = None if body is None else json.dumps(body).encode()
        token = (self.folder / name / "http.token").read_text().strip()
        request = urllib.request.Request(url + path, data, {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=900) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def status(self, name: str) -> dict[str, Any]:
        try:
            return self.ask(name, "/status")
        except (OSError, urllib.error.URLError):
            return {"engine": None, "engines": []}

    def engine(self) -> dict[str, Any]:
        """The lead's own status row of the engine."""
        rows = self.status("lead")["engines"]
        return dict(rows[0]) if rows else {"ready": False, "committed": None, "error": None}

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def check() -> None:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {self.log(name)}"

        wait_until(condition, lambda: f"{what}; {self.log('lead')}; {self.log('member')}", check=check)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text()[-2000:] if path.exists() else ""

    def live(self) -> None:
        """Wait until the newest version is live at both peers; then digest every worker's own weights in place."""
        step = self.step
        self.until(lambda: (e := self.engine())["ready"] and e["committed"] == f"0.{step}", f"0.{step} is live")
        self.until(
            lambda: (self.status("member")["engine"] or {}).get("serves") == f"0.{step}",
            f"the member knows of 0.{step}",
        )
        audit = self.ask("lead", "/verify", {})
        assert audit["ok"], audit
        (found,) = audit["engines"]
        assert (found["version"], found["wrong"], found["unknown"]) == (f"0.{step}", [], [])

    def paused(self) -> bool:
        with urllib.request.urlopen(self.server.url + "/is_paused", timeout=900) as answer:
            return bool(json.load(answer)["is_paused"])

    def answers(self, model: str = "m") -> list[str]:
        how = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        asked = [self.of_server("/v1/completions", {"prompt": prompt, **how}) for prompt in PROMPTS]
        return [str(json.loads(answer)["choices"][0]["text"]) for answer in asked]

    def of_server(self, path: str, body: dict[str, Any]) -> bytes:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=900) as answer:
            found: bytes = answer.read()
            return found


@contextmanager
def fleet_of(folder: Path, folders: list[Path]) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs:
        found = Fleet(folder, Path(tmpfs), folders)
        try:
            yield found
        finally:
            found.end()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, read_versions: Any) -> Iterator[Fleet]:
    """All processes are running, and no version is published yet."""
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("hosts")
    model = make_model(folder / "model")
    with fleet_of(folder, read_versions(model, folder, advance, VERSIONS)) as found:
        found.server_up(model)
        found.hub_up()
        found.member_up()
        found.server.wait()
        _, found.reference = loaded(found.server, [model, found.folders[COMPARED]], PROMPTS)
        found.lead_up()
        yield found


def test_engine_on_two_hosts_survives_the_loss_of_either(fleet: Fleet) -> None:
    # The member's workers read from their own peer: versions are installed on both hosts, the first whole, later ones
    # as changes.
    for _ in range(2):
        fleet.next_live()
    lead, member = fleet.status("lead")["engine"], fleet.status("member")["engine"]
    assert [(m["name"], m["ranks"], m["staged"]) for m in lead["members"]] == [("member", [1], f"0.{fleet.step}")]
    assert (member["role"], member["connected"], member["ready"], member["lead"]["node"]) == (
        "member", True, True, fleet.status("lead")["node"],
    )  # fmt: skip
    answers, before = fleet.answers(), fleet.step

    # Kill the member: the engine continues with its version, and gets the next one when the member is back.
    fleet.kill("member")
    fleet.publish()
    fleet.until(lambda: "member member is gone" in str(fleet.engine()["error"]), "the lead misses its member")
    assert fleet.engine()["committed"] == f"0.{before}"
    assert fleet.answers() == answers
    fleet.member_up()
    fleet.live()

    # Kill the lead; it returns at another port, which the hub sends to the member.
    left = fleet.status("member")["engine"]["lead"]
    fleet.kill("lead")
    fleet.lead_up()
    fleet.next_live()
    found = fleet.status("member")["engine"]["lead"]
    assert (found["node"], found["address"] != left["address"]) == (left["node"], True)
    assert fleet.step == COMPARED
    assert fleet.answers() == fleet.reference
    assert fleet.reference != answers


def test_member_lost_while_its_worker_prepares(fleet: Fleet) -> None:
    fleet.next_live()
    faults = fleet.folder / "faults"
    (faults / "hold.1").touch()
    (faults / "prepare-hangs.1").touch()
    fleet.publish()
    fleet.until(lambda: not (faults / "prepare-hangs.1").exists(), "the worker prepares")
    fleet.kill("member")
    fleet.until(lambda: "was lost before all was reported" in str(fleet.engine()["error"]), "the lead gives up")
    (faults / "hold.1").unlink()
    fleet.member_up()
    fleet.live()


def test_member_lost_while_its_worker_commits(fleet: Fleet) -> None:
    """Requests wait until the engine core knows both ranks' versions, which needs no peer."""
    fleet.next_live()
    answers, before, faults = fleet.answers(), fleet.step, fleet.folder / "faults"
    (faults / "hold.1").touch()
    (faults / "commit-hangs.1").touch()
    fleet.publish()
    fleet.until(lambda: not (faults / "commit-hangs.1").exists(), "the worker commits")
    fleet.kill("member")
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(fleet.answers)
        time.sleep(HELD_S)
        assert not asked.done()
        assert fleet.engine()["committed"] == f"0.{before}"
        (faults / "hold.1").unlink()
        assert asked.result() != answers
    fleet.until(lambda: fleet.engine()["committed"] == f"0.{fleet.step}", "the version is live without the member")
    fleet.member_up()
    fleet.live()
    assert not fleet.paused()


def test_second_lead_is_refused(fleet: Fleet) -> None:
    hub = (fleet.folder / "hub.log").read_text().split("listening on ")[1].split(",")[0]
    words = [
        "join",
        hub,
        "--plaintext",
        "--token-file",
        fleet.folder / "token",
        "--listen",
        "127.0.0.1:0",
        "--name",
        "usurper",
    ]
    words += [
        "--state",
        fleet.folder / "usurper",
        "--shadow",
        fleet.folder / "shadow",
        "--engine",
        "big",
        "--role",
        "lead",
    ]
    command = [sys.executable, "-m", "p2pcast.cli", *map(str, words), "--install", "vllm:http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 3
    assert "engine big has a lead already" in done.stderr


def test_adapters_of_an_engine_on_two_hosts(tmp_path: Path) -> None:
    """Each worker reads matrices and configuration from its own peer. vLLM's own loader is the truth."""
    model = make_model(tmp_path / "model")
    folders = [
        save(tmp_path / f"saved_{n}", matrices(model, seed=n, spread=0.2), config(alpha=4 + n)) for n in range(3)
    ]
    modules = ["--lora-modules", f"policy={folders[0]}"]
    with fleet_of(tmp_path, folders) as fleet:
        fleet.server_up(model, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", *modules)
        fleet.hub_up()
        fleet.member_up()
        fleet.server.wait()
        fleet.lead_up()
        before = fleet.answers()
        for step in range(len(folders)):
            fleet.next_live()
            fleet.of_server("/v1/load_lora_adapter", {"lora_name": f"truth-{step}", "lora_path": str(folders[step])})
            found = fleet.answers("policy")
            assert found == fleet.answers(f"truth-{step}") != before
            before = found
