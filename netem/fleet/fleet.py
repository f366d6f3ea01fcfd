"""A hub, its peers and further processes of p2pcast, started with the commands of users. Their ``FleetPlace`` is this
machine's loopback, or the hosts of an emulated network, in this kernel or in user-mode Linux.

The caller decides about weights, options and kills; ``Processes`` ends what still runs. Waiting blocks the thread;
``netem.fleet.wait`` waits for the same processes in an event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import safetensors

from netem.emulation.description import HUB, Emulated
from netem.fleet.daemon_http import EventReader, ReportedEvent, document
from netem.fleet.processes import FEW_THREADS, ChildProcess, FleetError, Processes, free_port
from netem.fleet.saved_weights import Tensors, write_weights
from netem.fleet.workspace import TMPFS, own_folder
from p2pcast.checkpoint.folder_form import STABLE
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

P2PCAST: Final = (sys.executable, "-P", "-m", "p2pcast.cli")
HUB_PORT, HTTP_PORT, PEER_PORT = 7077, 7078, 7079
"""At the hosts of an emulated network."""
LIMIT_S: Final = 300.0
"""Long enough for the first daemon on a machine to compile kernels while all daemons start at once."""
HTTP_S: Final = 10.0
POLL_S: Final = 0.01


class FleetPlace(Protocol):
    """Where processes run and listen."""

    @property
    def hub(self) -> str:
        """The address at which others reach the hub."""

    def addresses(self, name: str) -> list[str]:
        """The options of a hub or peer about its addresses."""

    def start(self, processes: Processes, name: str, words: Sequence[str | Path], host: str) -> ChildProcess:
        """``p2pcast WORDS`` at that host."""

    def connect(self, host: str, address: tuple[str, int]) -> socket.socket:
        """A TCP connection from that host. Raises OSError."""


class Hosts:
    """The hosts of an emulated network. A hub or a peer has the name of its host."""

    def __init__(self, net: Emulated) -> None:
        self.net = net
        self.hub = f"{net.network.address(HUB)}:{HUB_PORT}"

    def addresses(self, name: str) -> list[str]:
        port = HUB_PORT if name == HUB else PEER_PORT
        return ["--listen", f"0.0.0.0:{port}", "--http", f"127.0.0.1:{HTTP_PORT}"]

    def start(self, processes: Processes, name: str, words: Sequence[str | Path], host: str) -> ChildProcess:
        return processes.fork(name, words, self.net.space(host))

    def connect(self, host: str, address: tuple[str, int]) -> socket.socket:
        return self.net.connect(host, address, HTTP_S)


class Loopback:
    """This machine's loopback, with free ports. ``environment``: of each process."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.hub = f"127.0.0.1:{free_port()}"
        self._environment = FEW_THREADS if environment is None else environment

    def addresses(self, name: str) -> list[str]:
        return ["--listen", self.hub if name == HUB else "127.0.0.1:0", "--http", "127.0.0.1:0"]

    def start(self, processes: Processes, name: str, words: Sequence[str | Path], host: str) -> ChildProcess:
        return processes.start(name, [*P2PCAST, *words], environment=self._environment)

    def connect(self, host: str, address: tuple[str, int]) -> socket.socket:
        return socket.create_connection(address, HTTP_S)


@dataclass(frozen=True, slots=True)
class VersionTimeline:
    """One version, in seconds since the hub's first step of publishing it, before any encoding. ``received``: every
    piece verified. ``staged``: decoded, durable and in the peer's copy of the state. ``committed``: installed.
    """

    version: str
    bytes: int
    codec: str | None
    """None for a whole state."""
    opened_s: float
    """Unix time."""
    received_s: Mapping[str, float] = field(default_factory=dict)
    staged_s: Mapping[str, float] = field(default_factory=dict)
    committed_s: Mapping[str, float] = field(default_factory=dict)


class Fleet:
    """``folder``: for all files. ``memory``: for shadows. ``options``: of the hub and of each peer.
    ``follows``: the events of hub and peers are read from their start on.
    """

    def __init__(
        self,
        place: FleetPlace,
        processes: Processes,
        folder: Path,
        memory: Path,
        options: Sequence[str | Path] = (),
        *,
        follows: bool = True,
    ) -> None:
        self.place, self.processes, self.folder = place, processes, folder
        self._memory, self._options, self._follows = memory, tuple(options), follows
        self.states: dict[str, Path] = {}
        """Name → its state folder, if outside of ``folder``."""
        self.step = -1
        """Of the newest version."""
        self.saved_at_s = 0.0
        """Unix time when the newest folder was renamed into place."""
        self.events: dict[str, EventReader] = {}

    # -- folders

    @property
    def trained(self) -> Path:
        """The folder of checkpoints that the hub watches."""
        return self.folder / "train"

    @property
    def token(self) -> Path:
        """The hub's join token."""
        return self.state(HUB) / "token"

    def state(self, name: str) -> Path:
        return self.states.get(name, self.folder / "state" / name)

    def shadow(self, name: str) -> Path:
        return self._memory / "shadows" / name

    def installed(self, peer: str) -> Path:
        """The folder into which the peer installs."""
        return self.folder / "peers" / peer

    # -- processes

    def hub(self, *words: str | Path) -> ChildProcess:
        """Start the hub. ``words``: its watched folder, if any, and further options."""
        return self.node(HUB, "seed", *words)

    def peer(self, name: str, *words: str | Path, keep: int = 1) -> ChildProcess:
        """Start a peer that installs each version into a folder; a restarted peer keeps its stored state."""
        install = ("--install", f"safetensors:{self.installed(name)}", "--keep", str(keep))
        return self.node(name, "join", self.place.hub, "--token-file", self.token, "--name", name, *install, *words)

    def node(self, name: str, *words: str | Path) -> ChildProcess:
        """A hub or a peer, with addresses and folders of its own."""
        folders: list[str | Path] = ["--state", self.state(name), "--shadow", self.shadow(name)]
        child = self.start(name, *words, *self.place.addresses(name), *folders, *self._options)
        if self._follows:
            self.events[name] = EventReader(lambda: self.connect(name), self.state(name) / "http.token", name)
        return child

    def start(self, name: str, *words: str | Path, host: str | None = None) -> ChildProcess:
        """``p2pcast WORDS`` at that host; by default the host has the process's name."""
        (self.state(name) / "daemon.json").unlink(missing_ok=True)  # left by a killed process
        return self.place.start(self.processes, name, words, host or name)

    def until_joinable(self) -> None:
        """Return when peers may join."""
        self.until(self.token.exists, "the hub's token")

    def kill(self, name: str) -> None:
        """Kill the process group at once; files on disk remain."""
        self._signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)
        self.processes.children[name].expected = False

    def _signal(self, name: str, number: signal.Signals) -> None:
        self.processes.children[name].expected = True
        self.processes.children[name].signal(number)

    def leave(self, *names: str) -> None:
        """Stop these processes with SIGTERM; returns after their exit."""
        self.processes.stop(*names)
        for name in names:
            if name in self.events:
                self.events[name].close()

    def forget(self, peer: str) -> None:
        """Delete the stored weights of a stopped peer, so that its next start begins with nothing. Its identity
        remains: the hub binds a name to it.
        """
        stored = [path for path in self.state(peer).iterdir() if path.is_dir()]
        for path in (*stored, self.shadow(peer), self.installed(peer)):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        for events in self.events.values():
            events.close()

    # -- reports of the daemons

    def connect(self, name: str) -> socket.socket:
        """A connection to the HTTP side of a hub or peer. Raises OSError before it listens."""
        host, _, port = self.url(name).rpartition("//")[2].rpartition(":")
        return self.place.connect(name, (host, int(port)))

    def url(self, name: str) -> str:
        """Raises OSError before the daemon listens."""
        try:
            return str(json.loads((self.state(name) / "daemon.json").read_text())["http"])
        except ValueError as error:
            raise OSError(f"{name} is writing its address") from error

    def get(self, name: str, path: str = "/status") -> dict[str, Any]:
        """Raises OSError without an answer, LocalError for an error status."""
        self.processes.check()
        return document(lambda: self.connect(name), name, path)

    def answers(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            self.connect(name).close()
            return True
        return False

    def until(self, done: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until ``done()`` is true. Raises FleetError."""
        deadline = time.monotonic() + limit_s
        while not done():
            self.processes.check()
            if time.monotonic() > deadline:
                raise self._failure(HUB, f"no {what} within {limit_s:.0f} s")
            time.sleep(POLL_S)

    def wait_for(self, name: str, kind: str, limit_s: float = LIMIT_S, **facts: Any) -> ReportedEvent:
        """The reported event, once it has happened. Raises FleetError."""
        found = self.events[name].wait(kind, limit_s, self.processes.check, **facts)
        if found is None:
            raise self._failure(name, f"{name} reported no event {kind} {facts or ''} within {limit_s:.0f} s")
        return found

    def moments(self, name: str, last: str, limit_s: float = LIMIT_S) -> dict[str, ReportedEvent]:
        """Events of the newest version by kind, up to the event ``last``, which is awaited. Raises FleetError."""
        end = self.wait_for(name, last, limit_s, version=self.version)
        found = {}
        for event in self.events[name].reported:
            if event.facts.get("version") == self.version:
                found[event.kind] = event
                if event is end:
                    break
        return found

    def _failure(self, name: str, what: str) -> FleetError:
        child = self.processes.children.get(name)
        return FleetError(what) if child is None else child.failure(what)

    # -- versions

    @property
    def version(self) -> str:
        return str(Version(0, self.step))

    def save(self, tensors: Tensors, idle_s: float = 0.0) -> Path:
        """Save the next version as a trainer does, visible to the hub at once, after a pause of ``idle_s``. Only the
        newest three versions remain.
        """
        self.step += 1
        part, folder = self.folder / "part", self.trained / f"step_{self.step}"
        part.mkdir()
        self.trained.mkdir(exist_ok=True)
        write_weights(tensors, part / "model.safetensors")
        (part / STABLE).touch()
        time.sleep(idle_s)
        self.saved_at_s = time.time()
        part.rename(folder)
        shutil.rmtree(self.trained / f"step_{self.step - 3}", ignore_errors=True)
        return folder

    def live(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> None:
        """Return when all peers have installed the newest version."""
        for peer in peers:
            self.wait_for(peer, "committed", limit_s, version=self.version)

    def timeline(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> VersionTimeline:
        """The newest version, once all peers have installed it, compared bit for bit. Raises FleetError,
        IntegrityError.
        """
        opened_s = self.wait_for(HUB, "opened", limit_s, version=self.version).time_s
        received, staged, committed = {}, {}, {}
        for peer in peers:
            events = self.moments(peer, "committed", limit_s)
            if "receiving" in events and "received" in events:
                received[peer] = events["receiving"].time_s + events["received"].facts["took_s"] - opened_s
            staged[peer] = events["staged"].time_s - opened_s
            committed[peer] = events["committed"].time_s - opened_s
            self.exact(peer)
        # Peers may finish before the hub has updated its own copy.
        self.until(
            lambda: (self.get(HUB)["last"] or {}).get("version") == self.version,
            f"end of {self.version} at the hub",
            limit_s,
        )
        last = self.get(HUB)["last"]
        return VersionTimeline(self.version, int(last["bytes"]), last["codec"], opened_s, received, staged, committed)

    def exact(self, peer: str) -> None:
        """Raises IntegrityError if the peer has not installed exactly the newest version."""
        folder = f"step_{self.step}"
        check_same(self.trained / folder, self.installed(peer) / folder)

    def twice(self, peers: Sequence[str]) -> int:
        """Bytes that the peers received more than once."""
        return sum(int(self.get(peer)["bytes_duplicate"]) for peer in peers)


def check_same(saved: Path, installed: Path) -> None:
    """Raises IntegrityError if the folders hold different weights."""
    if _words(saved) != _words(installed):
        raise IntegrityError(f"{installed}: installed weights differ from the published {saved.name}")


def _words(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Name → dtype, shape, and a hash of the words."""
    found = safetensors.deserialize((folder / "model.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    return {name: (info["dtype"], tuple(info["shape"]), hashlib.sha256(info["data"]).digest()) for name, info in found}


@contextlib.contextmanager
def folders(root: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """A folder for all files, with a subfolder for logs, and one in tmpfs, if there is any. ``root``: by default the
    folder for temporary files.
    """
    below = (root or Path(tempfile.gettempdir())).resolve()
    with contextlib.ExitStack() as owned:
        folder = owned.enter_context(own_folder(below))
        apart = below != TMPFS and os.access(TMPFS, os.W_OK)
        memory = owned.enter_context(own_folder(TMPFS)) if apart else folder
        (folder / "logs").mkdir()
        yield folder, memory


@contextlib.contextmanager
def emulated_fleet(net: Emulated) -> Iterator[Fleet]:
    """A fleet at the hosts of the network, for the length of the block. From the main thread."""
    with folders() as (folder, memory), Processes(folder / "logs") as processes:
        made = Fleet(Hosts(net), processes, folder, memory)
        try:
            yield made
        finally:
            made.close()
