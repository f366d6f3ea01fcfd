"""The versions that a learner publishes: every κ-th step, beside the training that goes on.

Guarantees: the weights do not change while a snapshot is taken. A publication that fails is repeated with the weights
of a later step. The newest step is published before a wait that only new weights can end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from trainer_node.sdk.publication_handle import Handle

logger = logging.getLogger("p2pcast.learner")

RETRY_S, RETRY_MOST_S = 0.5, 15.0

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class VersionPublisher(Protocol):
    """``trainer_node.Publisher``."""

    def publish(self, step: int, named_tensors: Any, *, files: Mapping[str, bytes]) -> Handle: ...
    def resume(self, step: int, named_tensors: Any, *, files: Mapping[str, bytes]) -> Handle: ...


@dataclass(frozen=True, slots=True)
class PublishedTimes:
    """Times in seconds from the call. ``live_s``: until the stated share of engines served the version; None if not
    within the limit.
    """

    version: Version
    bytes: int
    changed: int
    elements: int
    snapshot_s: float
    durable_s: float
    live_s: float | None
    engines: int


class Publications:
    """All ranks call alike. ``weights``: names and tensors of the working copy. ``every``: κ. ``files``: small files of
    a step's version, by path.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        weights: Weights,
        every: int,
        *,
        live_share: float,
        live_limit_s: float,
        files: Callable[[int], Mapping[str, bytes]] = lambda step: {},
    ) -> None:
        self._publisher, self._weights, self._every, self._files = publisher, weights, every, files
        self._live_share, self._live_limit_s = live_share, live_limit_s
        self._handle: Handle | None = None
        self._step: int | None = None
        """Of the newest publication that has not failed."""
        self._stored: Version | None = None
        """The newest version that the hub is known to store."""
        self._done: queue.SimpleQueue[PublishedTimes] = queue.SimpleQueue()
        self._watchers: list[threading.Thread] = []

    def open(self, step: int) -> Version:
        """Publish the weights that this process begins with, under a branch of their own; repeated until the hub
        stores them. Raises errors that no repetition removes.
        """
        delays = Backoff(RETRY_S, RETRY_MOST_S, uniform)
        while True:
            self._begin(step, self._publisher.resume)
            assert self._handle is not None
            try:
                return self._handle.wait_durable()
            except RetryableError as error:
                logger.warning("%s", error)
            time.sleep(delays.next_s())

    def due(self, step: int) -> bool:
        """Whether the weights of ``step`` have to be published now: κ steps have passed, or the last attempt failed."""
        self._forget_failure()
        return self._step is None or step - self._step >= self._every

    def unpublished(self, step: int) -> bool:
        self._forget_failure()
        return self._step is None or self._step < step

    def begin(self, step: int) -> None:
        """Returns once the snapshot has begun; waits for the version before to be stored or given up."""
        self._begin(step, self._publisher.publish)

    def wait_snapshot(self) -> None:
        """Returns once the weights may change. A failure is met by ``due``."""
        if self._handle is not None:
            try:
                self._handle.wait_snapshot()
            except P2PCastError as error:
                logger.warning("%s", error)

    @property
    def stored(self) -> Version | None:
        """The newest version that the hub stores."""
        if self._handle is not None and self._handle.durable is not None:
            self._stored = self._handle.durable.version
        return self._stored

    def wait_durable(self) -> Version | None:
        """The last version, once the hub stores it; None if it failed."""
        if self._handle is None:
            return None
        try:
            return self._handle.wait_durable()
        except RetryableError as error:
            logger.warning("%s", error)
            return None

    def finished(self) -> list[PublishedTimes]:
        """Publications that ended since the last call."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def join(self, timeout_s: float) -> None:
        """Wait for the engines of the last versions."""
        until_s = time.monotonic() + timeout_s
        for thread in self._watchers:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _begin(self, step: int, publish: Callable[..., Handle]) -> None:
        began_s = time.monotonic()
        # The next version begins once this one is over.
        if self._handle is not None:
            self._handle.wait_over()
        self._stored = self.stored
        handle = self._handle = publish(step, list(self._weights()), files=self._files(step))
        self._step = step
        watcher = threading.Thread(target=self._watch, args=(handle, began_s), name=f"p2pcast live {step}", daemon=True)
        self._watchers = [thread for thread in self._watchers if thread.is_alive()] + [watcher]
        watcher.start()

    def _forget_failure(self) -> None:
        """Raises errors that no repetition removes, such as a later learner's branch at the hub."""
        handle = self._handle
        if handle is not None and handle.failed:
            self._step = None
            with suppress(RetryableError):
                handle.wait_durable()

    def _watch(self, handle: Handle, began_s: float) -> None:
        try:
            handle.wait_snapshot()
            snapshot_s = time.monotonic() - began_s
            version = handle.wait_durable()
            durable_s = time.monotonic() - began_s
            live_s, engines = None, 0
            try:
                engines = len(handle.wait_live(self._live_share, self._live_limit_s))
                live_s = time.monotonic() - began_s
            except RetryableError as error:
                logger.info("%s", error)
            stored = handle.durable
            assert stored is not None
            self._done.put(
                PublishedTimes(
                    version, stored.bytes, stored.changed, stored.params, snapshot_s, durable_s, live_s, engines
                )
            )
        except P2PCastError as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("a publication could not be followed")
