"""``Handle``, the result of ``Publisher.publish``: one version, and the moments that a trainer may wait for."""

from __future__ import annotations

import math
import threading
import time

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version
from trainer_node.sdk.hub_connection import HubConnection, Received, VersionDurable


class Handle:
    """A version that ``Publisher.publish`` began. Its waits may be called from any thread, any number of times."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.version: Version | None = None
        """None until the hub has begun the version."""
        self.durable: VersionDurable | None = None
        """Sizes of the stored version: bytes of the artifact, changed words, elements in the state."""
        self.uplink: HubConnection | None = None
        """The connection over which the version is sent."""
        self._copied = False
        self._settled = threading.Event()
        """Set once the snapshot is taken, or cannot be taken any more."""
        self._begun = threading.Event()
        """Set once the hub has assigned the version's number, or never will."""
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the version was aborted or could not be published."""
        return self._over.is_set() and self._error is not None

    def wait_snapshot(self) -> None:
        """Wait until the tensors may change. Raises only errors of the copy itself."""
        self._settled.wait()
        if not self._copied and self._error is not None:
            raise self._error

    def wait_begun(self, timeout_s: float | None = None) -> Version:
        """Wait until the hub has assigned the version's branch and step, and return them. Raises RetryableError at the
        time limit, and the errors of ``wait_durable`` if the version was never begun.
        """
        if not self._begun.wait(timeout_s):
            raise RetryableError(f"step {self.step} was not begun by the hub within {timeout_s:g} s")
        if self.version is None:
            assert self._error is not None
            raise self._error
        return self.version

    def wait_durable(self, timeout_s: float | None = None) -> Version:
        """Wait until the version is stored at the hub, and return it. Raises RetryableError if the version was aborted
        (the message names the lost rank or hub) or is not stored in time, and any other error that made the version
        fail. An aborted version is not stored, and the next one may be published.
        """
        if not self._over.wait(timeout_s):
            raise RetryableError(f"step {self.step} is not stored at the hub within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self.version is not None
        return self.version

    def wait_live(self, fraction: float = 0.9, timeout_s: float = 60.0) -> dict[str, Version]:
        """Wait until at least ``fraction`` of the engines that the hub knows, and at least one, have committed this
        version or a newer one. Returns those engines (``peer/engine``) with the version of each. Raises RetryableError
        after ``timeout_s``, with the names of the late engines, and the errors of ``wait_durable``.
        """
        if not 0 < fraction <= 1:
            raise UsageError(f"a fraction of {fraction} of the engines: give more than 0 and at most 1")
        deadline = time.monotonic() + timeout_s
        version = self.wait_durable(timeout_s)
        assert self.uplink is not None

        def live_engines(received: Received) -> dict[str, Version] | None:
            there = {name: v for name, (v, _) in received.engines.items() if v is not None and v >= version}
            # Rounding errors must not turn a share such as 0.9 × 10 into 10.
            return there if there and len(there) >= math.ceil(fraction * len(received.engines) - 1e-9) else None

        found = self.uplink.wait(live_engines, max(0.0, deadline - time.monotonic()))
        if found is None:
            engines = self.uplink.received.engines
            behind = [
                f"{name} at {v or 'nothing'}" for name, (v, _) in sorted(engines.items()) if v is None or v < version
            ]
            raise RetryableError(
                f"version {version} is not live within {timeout_s:g} s: "
                f"{', '.join(behind) or 'the hub knows of no engine'}"
            )
        return found

    # -- for the publisher

    def taken(self) -> None:
        self._copied = True
        self._settled.set()

    def begun(self, version: Version) -> None:
        self.version = version
        self._begun.set()

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._over.set()
        self._begun.set()
        self._settled.set()

    def wait_over(self) -> None:
        """Wait until the version is stored or aborted, or has failed."""
        self._over.wait()
