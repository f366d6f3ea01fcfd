"""Small runs of real processes, and what their hubs and peers showed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tests.support.until import check_runs, wait_until

DEADLINE_S = 600.0
"""The first start after a change of source compiles kernels."""
ASK_S = 600.0
WORDS = 1_500_000
LAST_STEP = 3
LAST = f"0.{LAST_STEP}"
HUB, PEERS = "hub", ("near", "far")

Document = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    code: int
    kind: str
    text: str

    def document(self) -> Any:
        return json.loads(self.text)


@dataclass
class Seen:
    """By daemon, but for what commands printed."""

    statuses: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    """All that were read."""
    settled: dict[str, Document] = field(default_factory=dict)
    """Statuses that show all effects of the last version."""
    metrics: dict[str, str] = field(default_factory=dict)
    events: dict[str, list[tuple[str, Document]]] = field(default_factory=dict)
    answers: dict[str, dict[str, Answer]] = field(default_factory=lambda: defaultdict(dict))
    """The request in words → the answer."""
    folders: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Path in the folder → contents as far as they are small; folders end with /."""
    logs: dict[str, list[Document]] = field(default_factory=dict)
    printed: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Command → its exit code, and what it printed."""
    codes: dict[str, int] = field(default_factory=dict)
    """How daemons ended."""


def environment() -> dict[str, str]:
    """This process's environment, without variables that set options."""
    return {k: v for k, v in os.environ.items() if not k.startswith("P2PCAST_")}


def run(*words: object, limit_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment())


class Daemon:
    """``p2pcast seed`` or ``join`` in a process of its own, on loopback."""

    def __init__(self, folder: Path, shadows: Path, name: str, *words: object) -> None:
        self.name, self.state, self.log = name, folder / name, folder / f"{name}.log"
        here = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--state", self.state, "--shadow", shadows / name)
        command = [sys.executable, "-m", "p2pcast.cli", "--log-format", "json", *map(str, (*words, *here))]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output, env=environment())

    @property
    def there(self) -> Document:
        """The contents of daemon.json in the daemon's state folder."""
        document: Document = json.loads((self.state / "daemon.json").read_text())
        return document

    @property
    def answers(self) -> bool:
        return (self.state / "daemon.json").exists()

    @property
    def url(self) -> str:
        return str(self.there["http"])

    @property
    def bearer(self) -> str:
        return (self.state / "http.token").read_text().strip()

    def ask(self, method: str, path: str, body: Any = None, *, bearer: bool = False, **headers: str) -> Answer:
        if bearer:
            headers["Authorization"] = f"Bearer {self.bearer}"
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as answer:
                return Answer(answer.status, answer.headers.get_content_type(), answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers.get_content_type(), error.read().decode())

    def status(self) -> Document:
        document: Document = self.ask("GET", "/status").document()
        return document

    def events(self) -> list[tuple[str, Document]]:
        """All so far, after the one that says that those up to the first are not."""
        (count,) = re.findall(r"^p2pcast_events_total (\S+)$", self.ask("GET", "/metrics").text, re.MULTILINE)
        out: list[tuple[str, Document]] = []
        with urllib.request.urlopen(f"{self.url}/events?since=1", timeout=ASK_S) as answer:
            while len(out) <= float(count):
                block = iter(lambda: answer.readline().decode().rstrip("\n"), "")
                lines = dict(line.partition(": ")[::2] for line in block)
                assert lines.keys() == {"id", "event", "data"}
                out.append((lines["event"], json.loads(lines["data"])))
        return out

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def checkpoint(folder: Path, step: int) -> None:
    """Some of its words are other ones at each step, all of them at the last: a large version shows rates."""
    draw = np.random.default_rng(0 if step < LAST_STEP else step)
    words = draw.integers(0, 1 << 16, WORDS, dtype=np.uint16)
    words[: WORDS // 8] ^= np.uint16(step)
    part = folder / f".step_{step}"
    part.mkdir(parents=True)
    at, size = words.ctypes.data, words.nbytes
    spec = safetensors.TensorSpec(dtype="bfloat16", shape=[len(words)], data_ptr=at, data_len=size)
    safetensors.serialize_file({"w": spec}, part / "model.safetensors")
    (part / "config.json").write_text("{}")
    (part / "STABLE").touch()
    part.rename(folder / f"step_{step}")


class Live:
    def __init__(self, folder: Path, shadows: Path) -> None:
        self.folder, self.shadows, self.seen = folder, shadows, Seen()
        self.daemons: dict[str, Daemon] = {}

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Every daemon's status is kept at each look."""

        def check() -> None:
            for daemon in self.daemons.values():
                check_runs(daemon.process, daemon.log)

        wait_until(condition, what, check=check)

    def begin(self, name: str, *words: object) -> Daemon:
        daemon = self.daemons[name] = Daemon(self.folder, self.shadows, name, *words)
        return daemon

    def answers(self, *names: str) -> None:
        self.until(lambda: all(self.daemons[n].answers for n in names), f"{' and '.join(names)} answer")

    def look(self) -> dict[str, Document]:
        now = {name: daemon.status() for name, daemon in self.daemons.items()}
        for name, status in now.items():
            self.seen.statuses[name].append(status)
        return now

    def published(self, step: int) -> None:
        checkpoint(self.folder / "checkpoints", step)
        self.until(lambda: self.live(f"0.{step}"), f"version 0.{step} is live everywhere")

    def live(self, version: str) -> bool:
        now = self.look()
        return now[HUB]["version"] == version and all(now[name]["committed"] == version for name in PEERS)

    def settled(self) -> bool:
        """Whether all effects of the last version are complete: reports, scores, the mirror, an anchor."""
        now = self.look()
        hub, peers = now[HUB], [now[name] for name in PEERS]
        told = all(p["committed"] == p["staged"] == LAST and p["state"] == "current" for p in hub["peers"])
        rated = all(p["score"] is not None for p in hub["peers"])
        kept = any(a["kind"] == "anchor" and a["version"] != "0.0" for a in hub["artifacts"])
        mirrored = hub["mirror"]["version"] == LAST
        chained = bool(hub["links"]) and all(p["links"] and p["link"] for p in peers)
        timed = hub["last"]["time_to_last_s"] is not None
        calm = not any(p["pulling"]["sources"] or p["pulled_by"] for p in peers)
        self.seen.settled = now
        return calm and len(hub["peers"]) == len(PEERS) and told and rated and kept and mirrored and chained and timed

    def start(self, commit: str, who: str = "", *more: object) -> None:
        """``more``: options of the peer ``who`` alone."""
        checkpoint(self.folder / "checkpoints", 0)
        mirror = f"file://{self.folder / 'mirror'}"
        token = self.folder / "token"
        words = (
            "--token-file",
            token,
            "--mirror",
            mirror,
            "--mirror-rate",
            "10gbit",
            "--recall",
            0,
            "--anchor-every",
            2,
        )
        hub = self.begin(HUB, "seed", self.folder / "checkpoints", *words, "--chains", 1, "--commit", commit)
        self.answers(HUB)
        self.until(token.exists, "the token is there")
        self.until(lambda: bool(self.listening(hub)), "the log says where it listens")
        address = self.listening(hub)[0]
        for name in PEERS:
            given = ("--token-file", token, "--name", name, "--region", "here", "--from", mirror, "--stripes", 2)
            self.begin(
                name,
                "join",
                address,
                *given,
                "--install",
                f"safetensors:{self.folder / 'out' / name}",
                *(more if name == who else ()),
            )
        self.answers(*PEERS)

    def listening(self, hub: Daemon) -> list[str]:
        """The hub's addresses by its log; empty before the log names them."""
        found = [re.search(r"\blistening on (\S+),", line["message"]) for line in log_lines(hub.log)]
        return [match[1] for match in found if match]


def log_lines(log: Path) -> list[Document]:
    """Whole lines; an error's line for people is none of them."""
    lines = log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]


@contextlib.contextmanager
def swarm(folder: Path) -> Iterator[Live]:
    """A live run. All its processes are ended."""
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as shadows:
        live = Live(folder, Path(shadows))
        try:
            yield live
        finally:
            for daemon in live.daemons.values():
                if daemon.process.poll() is None:
                    daemon.process.kill()
                    daemon.process.wait()
