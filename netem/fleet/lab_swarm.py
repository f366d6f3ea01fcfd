"""A hub and peers at the hosts of an emulated network, started with the commands of users: ``p2pcast seed``, ``p2pcast
join``.

The caller decides about weights, options and kills. Promises: all processes end with the block, also if this process is
killed. ``timeline`` compares each peer's installed weights with the published weights, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

from netem.broadcast.daemons import Daemons
from netem.broadcast.emulated_fleet import HTTP_S, HUB_PORT, LIMIT_S, PEER_PORT
from netem.broadcast.host_http import HTTP_PORT, document
from netem.broadcast.process_folders import own_folder
from netem.broadcast.rivals import HUB
from netem.emulation.description import Emulated
from netem.fleet.event_reader import EventReader, ReportedEvent
from netem.fleet.saved_weights import Tensors
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version

TMPFS = Path("/dev/shm")
POLL_S = 0.02
DTYPES = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Timeline:
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


class Swarm:
    """Made by ``swarm``; valid while its block runs."""

    def __init__(self, net: Emulated, daemons: Daemons, folder: Path, memory: Path) -> None:
        self.net, self.daemons, self.folder = net, daemons, folder
        self.step = -1
        self.events: dict[str, EventReader] = {}
        self._memory = memory
        self.trained.mkdir()

    @property
    def trained(self) -> Path:
        """The folder of checkpoints that the hub watches."""
        return self.folder / "train"

    @property
    def version(self) -> str:
        return str(Version(0, self.step))

    # -- processes

    def hub(self, *options: str | float) -> None:
        """Start the hub; returns when peers may join."""
        token = self.folder / "token"
        self.start_node(
            HUB, "seed", self.trained, "--listen", f"0.0.0.0:{HUB_PORT}", "--http", f"127.0.0.1:{HTTP_PORT}",
            "--token-file", token, *options,
        )  # fmt: skip
        self.until(token.exists, "the hub's token")

    def join(self, *peers: str, options: Sequence[str | float] = ()) -> None:
        """Start these peers; restarted peers keep their stored state."""
        for peer in peers:
            self.start_node(
                peer, "join", f"{self.net.network.address(HUB)}:{HUB_PORT}", "--listen", f"0.0.0.0:{PEER_PORT}",
                "--http", f"127.0.0.1:{HTTP_PORT}", "--token-file", self.folder / "token", "--name", peer,
                "--install", f"safetensors:{self.installed(peer)}", "--keep", 1, *options,
            )  # fmt: skip

    def start_node(self, host: str, *words: str | float | Path) -> None:
        """``p2pcast WORDS``, a hub or a peer, with folders of its own and a reader of its events."""
        every = [
            *map(str, words),
            "--state",
            str(self.folder / "state" / host),
            "--shadow",
            str(self._memory / host),
        ]
        self.daemons.start(host, every, self.net.space(host))
        self.events[host] = EventReader(self.net, host)

    def leave(self, *hosts: str) -> None:
        """Stop these peers with SIGTERM; returns after their exit."""
        self.daemons.stop(*hosts)
        for host in hosts:
            self.events[host].close()

    def forget(self, host: str) -> None:
        """Delete the stored state of a stopped peer, so that its next start begins with nothing."""
        for path in (self.folder / "state" / host, self._memory / host, self.installed(host)):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        for events in self.events.values():
            events.close()

    # -- reports of the daemons

    def get(self, host: str, path: str = "/status") -> dict[str, Any]:
        """Raises OSError without an answer, LocalError for an error status."""
        self.daemons.check()
        return document(self.net, host, path, HTTP_S)

    def until(self, done: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until ``done()`` is true. Raises LocalError."""
        deadline = time.monotonic() + limit_s
        while not done():
            self.daemons.check()
            if time.monotonic() > deadline:
                raise LocalError(f"no {what} within {limit_s:.0f} s")
            time.sleep(POLL_S)

    def wait_for(self, host: str, kind: str, limit_s: float = LIMIT_S, **facts: Any) -> ReportedEvent:
        """The reported event, once it has happened. Raises LocalError."""
        found = self.events[host].wait(kind, limit_s, self.daemons.check, **facts)
        if found is None:
            raise self.daemons.daemons[host].failure(
                f"{host} reported no event {kind} {facts or ''} within {limit_s:.0f} s"
            )
        return found

    # -- versions

    def installed(self, peer: str) -> Path:
        return self.folder / "peers" / peer

    def save(self, tensors: Tensors) -> Path:
        """Save the next version as a trainer does, visible to the hub at once. Deletes the version before the previous
        one.
        """
        self.step += 1
        part, folder = self.folder / "part", self.trained / f"step_{self.step}"
        part.mkdir()
        specs = {
            name: safetensors.TensorSpec(
                dtype=DTYPES[kind], shape=list(shape), data_ptr=words.ctypes.data, data_len=words.nbytes
            )
            for name, (kind, shape, words) in tensors.items()
        }
        safetensors.serialize_file(specs, part / "model.safetensors")
        (part / "STABLE").touch()
        part.rename(folder)
        shutil.rmtree(self.trained / f"step_{self.step - 2}", ignore_errors=True)
        return folder

    def live(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> None:
        """Return when all peers have installed the newest version."""
        for peer in peers:
            self.wait_for(peer, "committed", limit_s, version=self.version)

    def timeline(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> Timeline:
        """The newest version, once all peers have installed it, compared bit for bit. Raises LocalError,
        IntegrityError.
        """
        version = self.version
        opened_s = self.wait_for(HUB, "opened", limit_s, version=version).time_s
        self.live(peers, limit_s)
        received, staged, committed = {}, {}, {}
        for peer in peers:
            events = self.events[peer]
            begun, done = events.find("receiving", version=version), events.find("received", version=version)
            if begun is not None and done is not None:
                received[peer] = begun.time_s + done.facts["took_s"] - opened_s
            staged[peer] = self.wait_for(peer, "staged", version=version).time_s - opened_s
            committed[peer] = self.wait_for(peer, "committed", version=version).time_s - opened_s
            self.exact(peer)
        # Peers may finish before the hub has updated its own copy.
        self.until(
            lambda: (self.get(HUB)["last"] or {}).get("version") == version, f"end of {version} at the hub", limit_s
        )
        last = self.get(HUB)["last"]
        return Timeline(version, int(last["bytes"]), last["codec"], opened_s, received, staged, committed)

    def exact(self, peer: str) -> None:
        """Raises IntegrityError if the peer has not installed exactly the newest version."""
        folder = f"step_{self.step}"
        saved, installed = (_words(root / folder) for root in (self.trained, self.installed(peer)))
        if saved != installed:
            raise IntegrityError(f"{peer}: installed weights differ from the published {folder}")

    def twice(self, peers: Sequence[str]) -> int:
        """Bytes that the peers received more than once."""
        return sum(int(self.get(peer)["bytes_duplicate"]) for peer in peers)


def _words(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Name → dtype, shape, and a hash of the words."""
    found = safetensors.deserialize((folder / "model.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    return {name: (info["dtype"], tuple(info["shape"]), hashlib.sha256(info["data"]).digest()) for name, info in found}


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A folder for all files, with a subfolder for logs, and one for shadows, in tmpfs if there is any."""
    with contextlib.ExitStack() as owned:
        folder = owned.enter_context(own_folder(Path(tempfile.gettempdir())))
        apart = Path(tempfile.gettempdir()) != TMPFS and os.access(TMPFS, os.W_OK)
        memory = owned.enter_context(own_folder(TMPFS)) if apart else folder
        (folder / "logs").mkdir()
        yield folder, memory / "shadows"


@contextlib.contextmanager
def swarm(net: Emulated) -> Iterator[Swarm]:
    """For the length of the block. From the main thread."""
    with folders() as (folder, memory), Daemons(folder / "logs") as daemons:
        made = Swarm(net, daemons, folder, memory)
        try:
            yield made
        finally:
            made.close()
