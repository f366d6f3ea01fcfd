"""Hubs for publishers: real ones with real peers, as processes; and one that a test plays itself, for what a real hub
never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from netem.fleet.processes import Processes, free_port
from p2pcast.ground.errors import P2PCastError
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.stripe import Stripe
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import Type
from tests.support.until import wait_until

DEADLINE_S = 600.0


class Run:
    """A hub and peers, each a process started by the command that users type."""

    def __init__(self, folder: Path, tmpfs: Path, processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.address = f"127.0.0.1:{free_port()}"
        self.token = folder / "token"
        self._tmpfs = tmpfs

    def hub_up(self, *options: object) -> None:
        self.token.unlink(missing_ok=True)
        (self.folder / "hub" / "daemon.json").unlink(missing_ok=True)
        command = [
            "seed",
            "--plaintext",
            "--listen",
            self.address,
            "--http",
            "127.0.0.1:0",
            "--state",
            self.folder / "hub",
        ]
        self._start("hub", *command, "--shadow", self._tmpfs / "hub", "--token-file", self.token, *options)
        self._until("hub", self.token.exists, "the hub answers")

    def peer_up(self, name: str, *options: object) -> None:
        command = ["join", self.address, "--plaintext", "--token-file", self.token, "--name", name, "--keep", 1000]
        command += [
            "--install",
            f"safetensors:{self.out(name)}",
            "--state",
            self.folder / name,
            "--listen",
            "127.0.0.1:0",
        ]
        self._start(name, *command, "--shadow", self._tmpfs / name, *options)
        self._until(name, (self.folder / name / "daemon.json").exists, f"{name} answers")

    def down(self, name: str) -> None:
        self.processes.stop(name)

    def out(self, name: str = "peer") -> Path:
        return self.folder / f"{name}-out"

    def status(self, name: str = "hub") -> dict[str, Any]:
        url = json.loads((self.folder / name / "daemon.json").read_text())["http"]
        with urllib.request.urlopen(f"{url}/status") as answer:
            document: dict[str, Any] = json.load(answer)
            return document

    def commit(self, version: str) -> None:
        url = json.loads((self.folder / "hub" / "daemon.json").read_text())["http"]
        headers = {"Authorization": f"Bearer {(self.folder / 'hub' / 'http.token').read_text().strip()}"}
        request = urllib.request.Request(f"{url}/commit", json.dumps({"version": version}).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200

    def installed(self, step: int, name: str = "peer") -> dict[str, torch.Tensor]:
        """The tensors of the peer's folder step_N, once complete; read with the safetensors library."""
        folder = self.out(name) / f"step_{step}"
        self._until(name, (folder / "STABLE").exists, f"step {step} is at {name}")
        return load_file(folder / "model.safetensors")

    def _start(self, name: str, *words: object) -> None:
        self.processes.start(name, [sys.executable, "-m", "p2pcast.cli", *map(str, words)])

    def _until(self, name: str, condition: Callable[[], Any], what: str) -> None:
        def text() -> str:
            return f"{what}\n" + "\n".join(f"{n}: {self.processes.children[n].tail()}" for n in (name, "hub"))

        wait_until(condition, text, check=self.processes.check)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs, Processes(logs) as processes:
        yield Run(tmp_path, Path(tmpfs), processes)


class PlayedHub(QuietOwner):
    """Accepts ranks over real sockets, keeps what they say, and says what the test tells it to."""

    def __init__(self, folder: Path) -> None:
        token = JoinToken(secrets.token_bytes(16), secrets.token_bytes(20))
        self.token = folder / "played-token"
        self.token.write_text(str(token))
        self.links: list[Link] = []
        self.lost: list[Link] = []
        self.said: list[tuple[Link, Type, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._identity = Identity(secrets.token_bytes(16), "played", token)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._listener = Listener(self, self._identity)
        self._do(self._listener.start("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.address)

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def close(self) -> None:
        self._do(self._listener.stop())
        # Closed connections report their end in the loop's next pass.
        self._do(asyncio.sleep(0.01))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def say(self, record: messages.Record, link: Link | None = None) -> None:
        self._do(self._call((link or self.links[-1]).send, record))

    def away(self) -> None:
        """Stop listening."""
        self._do(self._listener.stop())

    def back(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._do(self._listener.start(host, int(port)))

    def hang_up(self, error: P2PCastError | None = None) -> None:
        self._do(self._call(self.links[-1].close, error))

    def deaf(self, deaf: bool = True) -> None:
        self._do(self._call(self.links[-1].pause_reading if deaf else self.links[-1].resume_reading))

    def received(self, *kinds: Type, count: int = 1) -> list[Any]:
        """The bodies of messages of these kinds, once there are ``count``."""

        def look() -> list[Any]:
            return [body for _, kind, body in list(self.said) if kind in kinds]

        found: list[Any] = wait_until(look, self._so_far, holds=lambda found: len(found) >= count)
        return found

    def received_of(self, kind: Type, serial: int) -> Any:
        """The message of this kind that speaks of ``serial``."""

        def look() -> Any:
            return next((body for _, k, body in list(self.said) if k is kind and body.serial == serial), None)

        return wait_until(look, self._so_far)

    def _so_far(self) -> str:
        return f"so far: {[kind.name for _, kind, _ in self.said]}"

    def ranked(self, groups: int = 1) -> None:
        """Let the newest group, of one rank, go on once there were ``groups``."""
        self.received(Type.RANK, count=groups)
        self.say(messages.Ranked(head=None, layout=None, state=None))

    # -- Acceptor, LinkOwner

    def accept_link(self, link: Link, hello: messages.Hello) -> None:
        assert (hello.purpose, hello.role) == ("publish", "rank")
        self.links.append(link)

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        assert isinstance(event, Message)
        if isinstance(event.body, messages.Ping):
            link.send(messages.Pong(event.body.t))
        elif isinstance(event.body, messages.Leave):
            link.close()
        else:
            self.said.append((link, event.type, event.body))

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.lost.append(link)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[PlayedHub]:
    hub = PlayedHub(tmp_path)
    with contextlib.closing(hub):
        yield hub


class States:
    """How tests keep and compare states."""

    @staticmethod
    def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
        """Names of tensors that are not the same bits."""

        def bits(tensor: torch.Tensor | None) -> Any:
            if tensor is None:
                return None
            words = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            return tensor.dtype, tensor.shape, bytes(words.numpy())

        return sorted(n for n in one.keys() | other.keys() if bits(one.get(n)) != bits(other.get(n)))

    @staticmethod
    def folder(path: Path, tensors: dict[str, torch.Tensor], **files: bytes) -> Path:
        """A Hugging Face folder."""
        path.mkdir(parents=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
        for name, contents in {"config.json": b"{}", **files}.items():
            (path / name).write_bytes(contents)
        return path


@pytest.fixture(scope="session")
def states() -> type[States]:
    return States
