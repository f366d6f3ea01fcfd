"""Fixtures: a hub and peers as tasks of one event loop, over loopback. The safetensors library writes and reads the
states, not p2pcast's own reader.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import safetensors
from blake3 import blake3

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.signed_records import run_id
from p2pcast.codec.layout import Layout
from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import SLICE_BYTES, slice_name, slices
from p2pcast.mirror.object_store import Objects
from p2pcast.process import event_loop
from p2pcast.trust.join_token import JoinToken
from rollout_node.control import saved_hub_state
from rollout_node.control.artifact_catalog import Entry
from rollout_node.peer import Peer
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_daemon import PeerDaemon
from rollout_node.sync.mirror_catalog import MirrorCatalog
from tests.support.until import until
from trainer_node.hub import Hub, opened
from trainer_node.hub_config import HubConfig
from trainer_node.publish import checkpoint_watcher

sys.path.append(str(Path(__file__).parent / "trust"))  # strangers

DEADLINE_S = 600.0

State = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → dtype as the safetensors library calls it, shape, contents."""

WIDTHS = {"bfloat16": 2, "float32": 4, "uint8": 1, "float64": 8, "int64": 8}
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed.weight": ("bfloat16", (311, 97)),
    "model.norm.weight": ("float32", (53,)),
    "model.odd": ("uint8", (1013,)),
    "model.scalar": ("float32", ()),
    "model.scalar16": ("bfloat16", ()),
    "model.nothing": ("bfloat16", (0, 5)),
    "model.wide": ("float64", (7, 3)),
    "model.ids": ("int64", (5,)),
}


def first_state(seed: int = 0, shapes: Mapping[str, tuple[str, tuple[int, ...]]] = SHAPES) -> State:
    """Random bits: every exponent, infinities and NaNs with payloads among them."""
    draw = np.random.default_rng(seed)
    state = {n: (d, s, draw.bytes(int(np.prod(s)) * WIDTHS[d])) for n, (d, s) in shapes.items()}
    name, (dtype, shape, contents) = next(iter(state.items()))
    odd_nans = bytes.fromhex("c17fa5ffff7f0080")
    return state | {name: (dtype, shape, odd_nans + contents[len(odd_nans) :])}


def trained(state: State, seed: int, share: float = 0.01) -> State:
    """Another state: about ``share`` of the words of each tensor have other bits. 1: every one, 0: none."""
    draw = np.random.default_rng(seed)
    out: State = {}
    for name, (dtype, shape, contents) in state.items():
        width = WIDTHS[dtype]
        words = np.frombuffer(contents, f"<u{width}").copy()
        chosen = draw.random(len(words)) < share
        words[chosen] ^= draw.integers(1, 200, chosen.sum(), dtype=words.dtype)
        out[name] = (dtype, shape, words.tobytes())
    return out


def write(folder: Path, state: State, files: Mapping[str, bytes] | None = None) -> Path:
    """A checkpoint, complete from the moment it has its name."""
    part = folder.with_name(f".{folder.name}.new")
    part.mkdir(parents=True)
    kept = {n: np.frombuffer(c, np.uint8) for n, (_, _, c) in state.items()}
    specs = {
        n: safetensors.TensorSpec(dtype=d, shape=list(s), data_ptr=kept[n].ctypes.data, data_len=kept[n].nbytes)
        for n, (d, s, _) in state.items()
    }
    (part / "model.safetensors").write_bytes(safetensors.serialize(specs))
    for path, contents in (files or {}).items():
        (part / path).parent.mkdir(parents=True, exist_ok=True)
        (part / path).write_bytes(contents)
    (part / "STABLE").touch()
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    return folder


_NAMES = {"BF16": "bfloat16", "F32": "float32", "U8": "uint8", "F64": "float64", "I64": "int64"}


def read(folder: Path) -> State:
    found = safetensors.deserialize((folder / "model.safetensors").read_bytes())
    return {n: (_NAMES[t["dtype"]], tuple(t["shape"]), bytes(t["data"])) for n, t in found}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names alone: pytest would compare megabytes character by character."""
    return sorted(n for n in one.keys() | other.keys() if one.get(n) != other.get(n))


def small_files(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("STABLE", "model.safetensors")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


class Swarm:
    """One run. It ends all daemons that it starts; an unexpected end of a daemon fails the current wait."""

    plaintext = True
    """Results over plain text hold behind TLS; TLS's additions are tested with TLS."""

    def __init__(self, folder: Path, tmpfs: Path) -> None:
        self.folder = folder
        self.tmpfs = tmpfs
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        self.hub: Hub = None  # type: ignore[assignment]  # once hub_up() was called
        self.address = ("127.0.0.1", 0)
        self.peer_daemons: dict[str, PeerDaemon] = {}
        self.steps: dict[int, tuple[State, dict[str, bytes]]] = {}
        """The last written state and small files of each step."""
        self._tasks: dict[Hub | PeerDaemon, asyncio.Task[None]] = {}
        self.expects_failures = False
        """Whether background tasks of daemons may fail: a test has them fail."""
        self._begun: list[Hub | PeerDaemon] = []

    # -- daemons

    async def hub_up(self, *, whole: bool = True, **options: Any) -> Hub:
        """``whole``: its disk leads to its newest version."""
        given: dict[str, Any] = {
            "checkpoints": self.checkpoints,
            "state": self.folder / "hub",
            "shadow": self.tmpfs / "hub",
            "listen": self.address,
            "http": ("127.0.0.1", 0),
            "token_file": self.folder / "token",
            "plaintext": self.plaintext,
            "recall_s": 0.0,
        }
        self.hub = hub = await self._open_hub(HubConfig(**given | options))
        await self.until(lambda: (self.folder / "hub" / "daemon.json").exists(), "the hub answers")
        self.address = hub.control.listener.address
        if whole and hub.state.store.newest() is not None:
            await self.until(
                lambda: hub.publishing.pipeline.head == hub.state.store.newest(), "the hub has taken up where it was"
            )
        return hub

    def peer_config(self, name: str, **options: Any) -> PeerConfig:
        token = JoinToken.parse((self.folder / "token").read_text())
        given: dict[str, Any] = {
            "hub": self.address,
            "token": token,
            "plaintext": not token.authority,
            "targets": (f"safetensors:{self.out(name)}",),
            "state": self.folder / name,
            "shadow": self.tmpfs / name,
            "name": name,
            "listen": ("127.0.0.1", 0),
            "stripes": 2,
            "keep": 100,
        }
        return PeerConfig(**given | options)

    @property
    def peers(self) -> dict[str, Peer]:
        """The peers that know the run's key, by name."""
        return {name: daemon.peer for name, daemon in self.peer_daemons.items() if daemon.peer is not None}

    def peer_begun(self, name: str, **options: Any) -> PeerDaemon:
        daemon = self.peer_daemons[name] = PeerDaemon(self.peer_config(name, **options))
        self._start(daemon)
        return daemon

    async def peer_up(self, name: str, **options: Any) -> Peer:
        return await self.answers(self.peer_begun(name, **options))

    async def answers(self, daemon: PeerDaemon) -> Peer:
        """Wait until the peer serves HTTP."""
        await self.until(lambda: (daemon.config.state / "daemon.json").exists(), f"{daemon.config.name} answers")
        assert daemon.peer is not None
        return daemon.peer

    async def peers_up(self, *names: str, **options: Any) -> list[Peer]:
        return [await self.peer_up(name, **options) for name in names]

    def _daemon(self, started: Hub | Peer | PeerDaemon) -> Hub | PeerDaemon:
        if isinstance(started, Peer):
            return next(daemon for daemon in self._begun if isinstance(daemon, PeerDaemon) and daemon.peer is started)
        return started

    def _forget(self, daemon: Hub | PeerDaemon) -> None:
        self.peer_daemons = {name: known for name, known in self.peer_daemons.items() if known is not daemon}

    async def down(self, started: Hub | Peer | PeerDaemon) -> None:
        """As SIGTERM does it."""
        daemon = self._daemon(started)
        task = self._tasks.pop(daemon)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=DEADLINE_S)
        assert done, f"{daemon} does not end: {task.get_stack()}"
        if not task.cancelled():
            task.result()
        self._forget(daemon)

    async def ended(self, started: Hub | Peer | PeerDaemon) -> BaseException:
        """The error that a daemon ends with by itself."""
        daemon = self._daemon(started)
        task = self._tasks.pop(daemon)
        self._forget(daemon)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([task])
        error = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert error is not None
        return error

    async def all_down(self) -> None:
        for daemon in list(self._tasks):
            await self.down(daemon)
        if not self.expects_failures:
            assert [failure for daemon in self._begun for failure in daemon.tasks.status()] == []

    async def _open_hub(self, config: HubConfig) -> Hub:
        """A running hub. Raises the error that ends its start."""
        built: asyncio.Future[Hub] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            async with opened(config) as hub:
                built.set_result(hub)
                await hub.run()

        task = asyncio.create_task(work())
        await asyncio.wait([task, built], return_when=asyncio.FIRST_COMPLETED)
        if not built.done():
            task.result()
        hub = built.result()
        self._begun.append(hub)
        self._tasks[hub] = task
        return hub

    def _start(self, daemon: PeerDaemon) -> None:
        self._begun.append(daemon)
        self._tasks[daemon] = asyncio.create_task(daemon.run())

    # -- what happens

    def publish(self, step: int, state: State, files: Mapping[str, bytes] | None = None) -> None:
        kept = dict(files or {"config.json": b'{"a": 1}'})
        write(self.checkpoints / f"step_{step}", state, kept)
        self.steps[step] = (state, kept)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        def check() -> None:
            for daemon, task in self._tasks.items():
                if task.done():
                    raise AssertionError(f"{daemon} ended while waiting until {what}") from task.exception()

        await until(condition, lambda: f"{what}; {self.picture()}", check=check)

    async def published(self, version: str) -> None:
        """The hub is through with it, as its /status says."""
        wanted = Version.parse(version)
        await self.until(
            lambda: (
                self.hub.publishing.lifecycle.published is not None
                and self.hub.publishing.lifecycle.published.version == wanted
            ),
            f"{version} is published",
        )

    async def mirrored(self, version: str) -> None:
        """Wait until the version is the newest whole version on the hub's mirror."""
        await self.until(
            lambda: self.hub.publishing.mirror_uploader.status()["version"] == version, f"{version} is on the mirror"
        )

    async def live(self, version: str, *peers: Peer | PeerDaemon) -> None:
        """Committed by ``peers`` (all), and known to be so at the hub; then what they installed is compared."""
        wanted = Version.parse(version)

        def chosen() -> list[Peer | None]:
            return [p.peer if isinstance(p, PeerDaemon) else p for p in peers or self.peer_daemons.values()]

        await self.until(lambda: all(p is not None and p.committed == wanted for p in chosen()), f"{version} is live")
        for peer in chosen():
            assert peer is not None
            self.check(peer, wanted.step)

    def check(self, peer: Peer, step: int) -> None:
        """Check the peer's folder step_N against the written checkpoint, tensor by tensor and file by file."""
        state, files = self.steps[step]
        folder = self.out(peer.config.name) / f"step_{step}"
        assert differing(read(folder), state) == []
        assert differing(small_files(folder), files) == []
        assert folder.joinpath("STABLE").exists()
        assert read(self.out(peer.config.name) / "latest").keys() == state.keys()

    def out(self, name: str) -> Path:
        return self.folder / f"{name}-out"

    def versions(self, kind: str = "") -> list[str]:
        """Artifacts of a kind in the hub's store."""
        return [str(v) for v in sorted(s.version for s in self.hub.state.store.artifacts.values() if kind in s.kind)]

    async def mirror_holds(self, objects: Objects, run_key: bytes) -> dict[bytes, Entry]:
        """Ready entries of a mirror, after reading every piece of them as a follower does."""
        catalog = MirrorCatalog(objects, run_id(run_key), asyncio.Semaphore(8))
        _, error = await catalog.refresh(run_key)
        assert error is None
        for artifact, entry in catalog.entries.items():
            assemblies: list[Assembly] = []

            async def verify(tail: Tail, layout: Layout, out: list[Assembly] = assemblies) -> None:
                out.append(tail.assembly(layout))

            await catalog.directory(artifact, run_key, {}, verify)
            log = b"".join([await objects.get(slice_name(artifact, n), SLICE_BYTES) for n in range(slices(entry.size))])
            assert len(log) == entry.size
            [assembly] = assemblies
            piece = assembly.open.piece
            for index in range(assembly.pieces):
                assert blake3(log[index * piece : (index + 1) * piece]).digest() == assembly.piece_hash(index)
        return catalog.entries

    def picture(self) -> str:
        peers = [
            (n, str(p.staged), p.sync.activity.state, p.sync.activity.error, [r.status() for r in p.runners])
            for n, p in self.peers.items()
        ]
        names = {p.ident.hex(): n for n, p in self.peers.items()}
        below = {
            names.get(ident, ident): names.get(above, above)
            for ident, above in self.hub.fleet.membership.plan.parent.items()
        }
        missed = [
            (above, child)
            for above in names
            for child in names
            if not self.hub.fleet.membership.reach.links(above, child, time.monotonic())
        ]
        return (
            f"hub {self.hub.publishing.pipeline.head}, skipped {self.hub.publishing.lifecycle.skipped}, plan {below}, "
            f"no link {[(names[a], names[b]) for a, b in missed]}, peers {peers}"
        )

    # -- HTTP

    async def get(self, daemon: Hub | Peer, path: str) -> tuple[int, str]:
        return await self._ask("GET", daemon, path, None)

    async def status(self, daemon: Hub | Peer) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(_url(daemon, "/status")) as answer:
            assert answer.status == 200
            document: dict[str, Any] = await answer.json()
            return document

    async def post(self, daemon: Hub | Peer, path: str, body: Any, *, token: str | None = "") -> tuple[int, str]:
        """``token``: empty for the daemon's own bearer, None for none."""
        return await self._ask("POST", daemon, path, body, daemon.http.access.bearer if token == "" else token)

    async def _ask(
        self, method: str, daemon: Hub | Peer, path: str, body: Any, token: str | None = None
    ) -> tuple[int, str]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        given: dict[str, Any] = {"headers": headers}
        given |= {"data": body} if isinstance(body, bytes) else {"json": body}
        async with aiohttp.ClientSession() as session, session.request(method, _url(daemon, path), **given) as answer:
            return answer.status, await answer.text()


def _url(daemon: Hub | Peer, path: str) -> str:
    host, port = daemon.http.address
    return f"http://{host}:{port}{path}"


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that daemons run on."""
    return {"uvloop": event_loop.new_event_loop}


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder in tmpfs, for shadows; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter fixed waits: a peer that ends waits for its next save, and a hub looks at its folder now and then. No
    control link ends because all its daemons, which share one loop, stood still.
    """
    control = ("control.hub_session", "engine.multi_host_leader", "engine.multi_host_member")
    for module in ("trainer_node.hub", *(f"rollout_node.{name}" for name in control)):
        monkeypatch.setattr(f"{module}.SILENCE_S", 600.0)
    monkeypatch.setattr(saved_hub_state, "SETTLE_S", 0.02)
    monkeypatch.setitem(checkpoint_watcher.watch.__kwdefaults__, "poll_s", 0.02)


@pytest.fixture
async def swarm(tmp_path: Path, tmpfs: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Swarm]:
    gc.collect()  # reports tasks that an earlier test has lost before this test begins
    gc.freeze()  # modules that earlier tests imported: a look through all of torch takes seconds
    swarm = Swarm(tmp_path, tmpfs)
    yield swarm
    await swarm.all_down()
    # asyncio reports a lost exception when the garbage collector finds its task: here and now, not in a later test.
    gc.collect()
    lost = [r.getMessage() for r in caplog.get_records("call") + caplog.get_records("teardown") if r.name == "asyncio"]
    assert not [text for text in lost if not text.startswith("Executing ")], lost


@pytest.fixture
def tls(swarm: Swarm) -> Swarm:
    swarm.plaintext = False
    return swarm


class States:
    """How tests make states and look at them."""

    first = staticmethod(first_state)
    trained = staticmethod(trained)
    write = staticmethod(write)
    read = staticmethod(read)
    shapes = SHAPES


@pytest.fixture(scope="session")
def states() -> type[States]:
    return States
