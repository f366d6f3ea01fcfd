"""A hub and peers at the hosts of an emulated network, as users start them: ``p2pcast seed``, ``p2pcast join``.

What is tried with them is the caller's: which weights, which options, who is killed. Promises: what was started is gone when the block is left, also when this process
is killed; ``timeline`` compares what each peer has installed with what was published, bit for bit.
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
from netem.broadcast.fleet import HTTP_S, HUB_PORT, LIMIT_S, PEER_PORT
from netem.broadcast.folders import own_folder
from netem.broadcast.inside import HTTP_PORT, document
from netem.broadcast.rivals import HUB
from netem.description import Emulated
from netem.lab.listening import Listening, Told
from netem.lab.weights import Tensors
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.version import Version

TMPFS = Path("/dev/shm")
POLL_S = 0.02
DTYPES = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Timeline:
    """One version, in seconds since the hub's first step of publishing it, before anything was encoded. ``received``: every piece verified; ``staged``: decoded,
    durable and in the peer's copy of the state; ``committed``: installed."""

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
    """Made by ``swarm``; to be used while its block runs."""

    def __init__(self, net: Emulated, daemons: Daemons, folder: Path, memory: Path) -> None:
        self.net, self.daemons, self.folder = net, daemons, folder
        self.step = -1
        self.heard: dict[str, Listening] = {}
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
        """Returns once peers may join."""
        token = self.folder / "token"
        self._start(
            HUB, "seed", self.trained, "--listen", f"0.0.0.0:{HUB_PORT}", "--http", f"127.0.0.1:{HTTP_PORT}",
            "--token-file", token, *options,
        )  # fmt: skip
        self.until(token.exists, "the hub's token")

    def join(self, *peers: str, options: Sequence[str | float] = ()) -> None:
        """Start these, also ones that have ended: they come back with what they had."""
        for peer in peers:
            self._start(
                peer, "join", f"{self.net.network.address(HUB)}:{HUB_PORT}", "--listen", f"0.0.0.0:{PEER_PORT}",
                "--http", f"127.0.0.1:{HTTP_PORT}", "--token-file", self.folder / "token", "--name", peer,
                "--install", f"safetensors:{self.installed(peer)}", "--keep", 1, *options,
            )  # fmt: skip

    def _start(self, host: str, *words: str | float | Path) -> None:
        every = [
            *map(str, words),
            "--state",
            str(self.folder / "state" / host),
            "--shadow",
            str(self._memory / host),
        ]
        self.daemons.start(host, every, self.net.space(host))
        self.heard[host] = Listening(self.net, host)

    def leave(self, *hosts: str) -> None:
        """Ended politely; returns once they have."""
        self.daemons.stop(*hosts)
        for host in hosts:
            self.heard[host].close()

    def forget(self, host: str) -> None:
        """What one that has ended had, is gone: it would come back with nothing."""
        for path in (self.folder / "state" / host, self._memory / host, self.installed(host)):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        for heard in self.heard.values():
            heard.close()

    # -- what they say

    def get(self, host: str, path: str = "/status") -> dict[str, Any]:
        """Raises OSError where there is no answer, LocalError for one that is no success."""
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

    def told(self, host: str, kind: str, limit_s: float = LIMIT_S, **facts: Any) -> Told:
        """What it tells of that, once it has happened. Raises LocalError."""
        found = self.heard[host].wait(kind, limit_s, self.daemons.check, **facts)
        if found is None:
            raise self.daemons.daemons[host].failure(f"{host} told of no {kind} {facts or ''} within {limit_s:.0f} s")
        return found

    # -- versions

    def installed(self, peer: str) -> Path:
        return self.folder / "peers" / peer

    def save(self, tensors: Tensors) -> Path:
        """The next version, as a trainer saves it: from now on the hub may see it. The one before the last is gone."""
        self.step += 1
        part, folder = self.folder / "part", self.trained / f"step_{self.step}"
        part.mkdir()
        specs = {
            name: safetensors.TensorSpec(dtype=DTYPES[kind], shape=list(shape), data_ptr=words.ctypes.data, data_len=words.nbytes)
            for name, (kind, shape, words) in tensors.items()
        }
        safetensors.serialize_file(specs, part / "model.safetensors")
        (part / "STABLE").touch()
        part.rename(folder)
        shutil.rmtree(self.trained / f"step_{self.step - 2}", ignore_errors=True)
        return folder

    def live(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> None:
        """Return once all of them have installed the newest version."""
        for peer in peers:
            self.told(peer, "committed", limit_s, version=self.version)

    def timeline(self, peers: Sequence[str], limit_s: float = LIMIT_S) -> Timeline:
        """Of the newest version, once all of them have installed it; compared bit for bit. Raises LocalError, IntegrityError."""
        version = self.version
        opened_s = self.told(HUB, "opened", limit_s, version=version).time_s
        self.live(peers, limit_s)
        received, staged, committed = {}, {}, {}
        for peer in peers:
            heard = self.heard[peer]
            begun, done = heard.find("receiving", version=version), heard.find("received", version=version)
            if begun is not None and done is not None:
                received[peer] = begun.time_s + done.facts["took_s"] - opened_s
            staged[peer] = self.told(peer, "staged", version=version).time_s - opened_s
            committed[peer] = self.told(peer, "committed", version=version).time_s - opened_s
            self.exact(peer)
        # Peers may be through before the hub has brought its own copy up to it.
        self.until(lambda: (self.get(HUB)["last"] or {}).get("version") == version, f"end of {version} at the hub", limit_s)
        last = self.get(HUB)["last"]
        return Timeline(version, int(last["bytes"]), last["codec"], opened_s, received, staged, committed)

    def exact(self, peer: str) -> None:
        """Raises IntegrityError where it has installed anything else than the newest version."""
        folder = f"step_{self.step}"
        saved, installed = (_words(root / folder) for root in (self.trained, self.installed(peer)))
        if saved != installed:
            raise IntegrityError(f"{peer} has not installed what was published as {folder}")

    def twice(self, peers: Sequence[str]) -> int:
        """Bytes that they were sent more than once."""
        return sum(int(self.get(peer)["bytes_duplicate"]) for peer in peers)


def _words(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Name → dtype, shape, and a hash of the words."""
    found = safetensors.deserialize((folder / "model.safetensors").read_bytes())  # type: ignore[no-untyped-call]
    return {name: (info["dtype"], tuple(info["shape"]), hashlib.sha256(info["data"]).digest()) for name, info in found}


@contextlib.contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """For all that is written, with one for logs in it; and for shadows, in tmpfs where there is any."""
    with contextlib.ExitStack() as owned:
        folder = owned.enter_context(own_folder(Path(tempfile.gettempdir())))
        apart = Path(tempfile.gettempdir()) != TMPFS and os.access(TMPFS, os.W_OK)
        memory = owned.enter_context(own_folder(TMPFS)) if apart else folder
        (folder / "logs").mkdir()
        yield folder, memory / "shadows"


@contextlib.contextmanager
def swarm(net: Emulated) -> Iterator[Swarm]:
    """For as long as the block runs. From the main thread."""
    with folders() as (folder, memory), Daemons(folder / "logs") as daemons:
        made = Swarm(net, daemons, folder, memory)
        try:
            yield made
        finally:
            made.close()
