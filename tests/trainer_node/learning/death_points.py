"""Points at which the learner, its publisher, the ledger or the hub dies, counted part by part.

The parts run beside each other, so each one's points are counted alone. A part that does the same work passes the same
points, and all parts but the hub pass them in the same order. The hub's threads write to its disk in any order, so a
point of the hub is the n-th step of one kind. ``publisher`` is the learner's process too: its points lie in the thread
that sends versions.

A dead part does nothing more. A learner ends at its next point at the latest, and everything that it could still do to
others lies behind a point. A hub is cut off from the network before any further step of its disk, and its disk is
restored from the record of the steps before.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from disk_image import Image, Left
from step_recorder import Recorder

from p2pcast.files.disk import DiskStep
from tests.trainer_node.ledger.crash_points import Died, Point
from trainer_node.sdk.hub_connection import HubConnection

T = TypeVar("T")

LEARNER, PUBLISHER, LEDGER, HUB = PARTS = ("learner", "publisher", "ledger", "hub")
MEMORY = ("tmpfs",)
"""Folders that a failure of the hub's machine empties."""


@dataclass(frozen=True)
class Death:
    """``torn``: half of the step at the point is done. ``left``: the remains on the disk of the hub's machine, which
    fails; None: the process alone dies.
    """

    point: Point
    torn: bool = False
    left: Left | None = None

    def __str__(self) -> str:
        how = "in the middle of" if self.torn else "before"
        machine = "" if self.left is None else f", with its machine, which keeps {self.left.value}"
        return f"{self.point.part} dies {how} point {self.point.number} ({self.point.kind}){machine}"


class PassedPoints:
    """All points that the parts of one run have passed. At most one death comes."""

    def __init__(self, death: Death | None = None) -> None:
        self.passed: dict[str, list[Point]] = {part: [] for part in PARTS}
        self.death, self.died = death, False
        self._kinds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reached(self, part: str, kind: str) -> Death | None:
        """The death that comes at this point."""
        with self._lock:
            number = len(self.passed[part])
            if part == HUB:
                number = self._kinds[kind]
                self._kinds[kind] += 1
            point = Point(number, part, kind)
            self.passed[part].append(point)
            if self.died or self.death is None or point != self.death.point:
                return None
            self.died = True
            return self.death


def _kind(step: DiskStep, root: Path) -> str:
    """Numbers and random parts of names are left out."""
    path = str(step.path.relative_to(root))
    return f"{step.what} {re.sub(r'[0-9a-f]{12,}|[0-9]+', '#', path)}"


class LearnerLife:
    """One process of the learner. ``folder``: of its checkpoints."""

    def __init__(self, points: PassedPoints, folder: Path) -> None:
        self._points, self.folder = points, folder
        self.dead = False

    def at(self, kind: str, part: str = LEARNER) -> None:
        """Raises Died, at this point or because the learner died at an earlier one."""
        if self.dead or self._points.reached(part, kind) is not None:
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Died(LEARNER)

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        """A step of the learner's disk."""
        if self.dead:
            self._die()
        death = self._points.reached(LEARNER, _kind(step, self.folder))
        if death is not None:
            if death.torn:
                data = b"".join(bytes(part) for part in step.parts)
                os.pwrite(step.fd, data[: len(data) // 2], step.at)
            self._die()
        return do()

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Messages of this learner's publisher to the hub are points."""
        life = self

        def die(connection: HubConnection) -> None:
            # Queued messages are lost, and the hub sees the end of the connection.
            connection.close()
            if not connection._thread.ident and not connection._loop.is_closed():
                connection._loop.close()

        def send(self: HubConnection, record: Any, nbytes: int = 0) -> None:
            try:
                life.at(f"send {record.type.name}", PUBLISHER)
            except Died:
                die(self)
                raise
            _send(self, record, nbytes)

        def dial(self: HubConnection, *terms: Any) -> Any:
            try:
                life.at("dial", PUBLISHER)
            except Died:
                die(self)
                raise
            return _open(self, *terms)

        _send, _open = HubConnection.send, HubConnection.open
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HubConnection, "send", send)
            patch.setattr(HubConnection, "open", dial)
            yield


class HubDisk:
    """The disk of the first hub of a run: all its steps are recorded, up to its death. ``cut_off``: called in any
    thread, returns once no message leaves the hub any more.
    """

    def __init__(self, points: PassedPoints, root: Path, cut_off: Callable[[], None]) -> None:
        self.root, self._points, self._cut_off = root, points, cut_off
        self._recorder = Recorder(root)
        self._order = threading.RLock()
        self._death: Death | None = None
        self._torn: DiskStep | None = None
        self.abandoned = False
        """The hub is dead, and may clean up after itself."""

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        with self._order:
            if self._death is None:
                death = self._points.reached(HUB, _kind(step, self.root))
                if death is None:
                    return self._recorder.step(step, do)
                self._death, self._torn = death, step
                if death.torn:
                    # Recorded, and done to the abandoned folder.
                    self._recorder.step(step, do)
        self._cut_off()
        if not self.abandoned:
            raise OSError(5, "the hub is dead", str(step.path))
        return do()

    def restore(self, target: Path) -> None:
        """Write the remains of the disk below ``target``."""
        assert self._death is not None
        image, done = Image(), list(self._recorder.done)
        last = done.pop() if self._death.torn else None
        for each in done:
            image.apply(each)
        if last is None:
            image.materialise(target, self._death.left, MEMORY)
            return
        with image.torn(last):
            image.materialise(target, self._death.left, MEMORY)


class DiskWatcher:
    """Gives each step to the part whose disk it is."""

    def __init__(self) -> None:
        self.hub: HubDisk | None = None
        self.learner: LearnerLife | None = None

    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        for part, root in (
            (self.hub, None if self.hub is None else self.hub.root),
            (self.learner, None if self.learner is None else self.learner.folder),
        ):
            if part is not None and root is not None and step.path.is_relative_to(root):
                return part.step(step, do)
        return do()
