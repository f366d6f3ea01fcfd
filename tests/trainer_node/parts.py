"""Fakes for unit tests of the hub's parts: recorded links, background tasks, and a small publishing chain on a real
store, without sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from p2pcast.artifact.run_key import RunKey
from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Work
from p2pcast.process.events import Events
from p2pcast.sparse import budget_schedule
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import RECORDS, Record, Type
from tests.p2pcast.wire.plain_records import plain
from topology.version_sizes import VersionSizes
from trainer_node.publish.codec_choice import CodecChoice
from trainer_node.publish.delta_publisher import DeltaPublisher
from trainer_node.publish.hub_shadow import HubShadow
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.published import Published
from trainer_node.publish.version_numbers import VersionNumbers
from trainer_node.publish.version_sealer import VersionSealer
from trainer_node.publish.version_source import FolderSource

HUB = b"h" * 16


def node(name: str) -> bytes:
    """A node's id, from one letter."""
    return name.encode() * 16


def ident(name: str) -> str:
    """A node's id as the planner knows it."""
    return node(name).hex()


def record_of(kind: Type, **body: Any) -> Record:
    """A decoded record. Fields that are not stated are None."""
    return RECORDS[kind](**dict.fromkeys(field.key for field in RECORDS[kind].fields) | body)


class FakeLink:
    """Records what is sent over it, and why it was closed."""

    def __init__(self, name: str = "a", host: str = "192.0.2.1") -> None:
        self.remote = node(name)
        self.name = name
        self.remote_host = host
        self.certificate: bytes | None = None
        self.sent: list[tuple[Type, Any]] = []
        self.closed = False
        self.aborted = False
        self.error: P2PCastError | None = None
        self.owner: Any = None
        self.reading = True
        self.first_word = ""
        self.stripes = {0: SimpleNamespace(writable=True, acked_bytes=0)}

    def send(self, record: Record) -> None:
        self.sent.append((record.type, plain(record)))

    def close(self, error: P2PCastError | None = None) -> None:
        if not self.closed:
            self.closed, self.error = True, error
            if self.owner is not None:
                self.owner.on_link_closed(self, error)

    def abort(self, error: P2PCastError | None = None) -> None:
        self.aborted = True
        self.close(error)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def expect_first_message(self, name: str) -> None:
        self.first_word = name

    def introduced(self) -> None:
        self.first_word = ""

    def hears(self, kind: Type, invalid: tuple[str, ...] = (), **body: Any) -> None:
        """Hand a message to the owner. Fields that are not stated are None."""
        self.owner.on_link_event(self, self.stripes[0], Message(kind, record_of(kind, **body), invalid_keys=invalid))

    def kinds(self) -> list[Type]:
        """Types of the messages sent since the last call."""
        found, self.sent = [kind for kind, _ in self.sent], []
        return found

    def bodies(self, kind: Type) -> list[Any]:
        return [body for sent, body in self.sent if sent is kind]


class Background:
    """``later`` of the parts: tasks that a test can wait for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def __call__(self, work: Coroutine[Any, Any, None] | Work, name: str, *, vital: bool = True) -> None:
        self.names.append(name)
        begun = work() if callable(work) else work
        self.tasks.append(asyncio.get_running_loop().create_task(begun, name=name))

    async def settle(self) -> None:
        """All tasks that have begun are over. Raises the first error."""
        while self.tasks:
            await self.tasks.pop(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)


async def in_thread(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A blocking call, at once."""
    return work(*args, **named)


def emitted(events: Events, kind: str | None = None) -> list[dict[str, Any]]:
    """Facts of the events of a kind, or all as (kind, facts)."""
    return [dict(e.facts) for e in events.after(0, 1000)[1] if kind is None or e.kind == kind]


def write_checkpoint(path: Path, seed: int = 0, *, config: str = "{}", shape: tuple[int, int] = (64, 65)) -> Path:
    """A folder whose weights depend on ``seed``; it gets its name only once whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.mkdir(parents=True)
    weights = np.random.default_rng(7).standard_normal(shape, np.float32)
    weights.reshape(-1)[: seed * 10] += np.float32(1)
    save_file({"w": weights}, draft / "model.safetensors")
    (draft / "config.json").write_text(config)
    (draft / "STABLE").touch()
    draft.rename(path)
    return path


def words_in(folder: Path) -> bytes:
    """The weights of a checkpoint, as bytes."""
    checkpoint = Checkpoint.open(folder)
    return b"".join(checkpoint.words(cell).tobytes() for cell in checkpoint.layout().cells)


class Announcer:
    """Records the announcements to peers."""

    def __init__(self) -> None:
        self.announced: list[tuple[Version, bool]] = []
        """Version, and whether it was sealed at that time."""
        self.withdrawn: list[bytes] = []

    def announce(self, holdings: Any) -> None:
        self.announced += [(h.open.version, h.assembly.sealed) for h in holdings]

    def withdraw(self, artifacts: list[bytes]) -> None:
        self.withdrawn += artifacts


class Encoder:
    """The publishing chain: sealer, shadow, pipeline, on a store in ``folder``."""

    def __init__(self, folder: Path, background: Background) -> None:
        self.folder = folder
        self.background = background
        self.key = RunKey.load_or_create(folder / "run.key")
        self.events = Events()
        self.staging = Staging(1)
        self.store = ArtifactStore(folder / "store", self.key.public)
        self.sizes = VersionSizes()
        self.announcer = Announcer()
        self.numbers = VersionNumbers(folder / "versions.log", "boot")
        self.sealer = VersionSealer(HUB, self.key, self.store, self.staging, self.events, self.announcer, background)
        self.node = self.sealer.node
        for stored in self.store.artifacts.values():
            self.node.add_stored(stored.assembly, self.store.open_log(stored))
        self.shadow = HubShadow(self.node, self.store, self.staging, folder / "shadow", self.numbers.seen)
        deltas = DeltaPublisher(self.node, self.store, self.key, self.staging, self.sizes, self.numbers)
        choice = CodecChoice("flat", lambda: None)  # type: ignore[arg-type, return-value]
        self.pipeline = Pipeline(
            self.node, self.store, self.key, self.staging, self.shadow, deltas, choice, self.numbers, self.make_room
        )
        self._running = asyncio.get_running_loop().create_task(self.node.run())

    async def make_room(self, need_bytes: float) -> None:
        for stored in self.store.make_room(need_bytes):
            self.node.forget(stored.id)

    async def publish(
        self, step: int, seed: int | None = None, *, schedule: bytes | None = None, **options: Any
    ) -> Published:
        """A checkpoint of this step, from a folder of its own. ``schedule``: its file of sparse attention."""
        path = self.folder / "checkpoints" / f"step_{step}"
        path.parent.mkdir(exist_ok=True)
        write_checkpoint(path, step if seed is None else seed, **options)
        if schedule is not None:
            (path / budget_schedule.FILE).write_bytes(schedule)
        checkpoint = Checkpoint.open(path)
        source = FolderSource(checkpoint, checkpoint.small_files(), self.staging)
        return await self.pipeline.publish(self.pipeline.version_for(step), checkpoint.layout(), source)

    def weights(self) -> bytes:
        """The state in the shadow."""
        shadow = self.shadow.shadow
        assert shadow is not None
        return b"".join(shadow.words(cell).tobytes() for cell in shadow.layout.cells)

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait([self._running])
        self.shadow.close()
        self.node.close()
        self.numbers.close()
        self.staging.close()
