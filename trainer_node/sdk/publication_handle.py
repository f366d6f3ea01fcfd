"""The result of ``Publisher.publish``: one version on its way, and the three moments that a trainer may wait for."""

from __future__ import annotations

import math
import threading
import time

from p2pcast.ground.errors import RetryableError, UsageError
from p2pcast.ground.version import Version
from trainer_node.sdk.hub_connection import HubConnection, Received, VersionDurable


class Handle:
    """One version of ``Publisher.publish``. Its waits may be called from any thread, any number of times."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.version: Version | None = None
        """Known once the hub has begun the version."""
        self.durable: VersionDurable | None = None
        """Sizes of the stored version: bytes of the artifact, changed words, elements in the state."""
        self.uplink: HubConnection | None = None
        """The connection over which the version is sent."""
        self._copied = False
        self._settled = threading.Event()
        """Set once the snapshot is taken, or can never be taken."""
        self._begun = threading.Event()
        """Set once the hub has named the version, or never will."""
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """The version was aborted, or could not be published."""
        return self._over.is_set() and self._error is not None

    def wait_snapshot(self) -> None:
        """Returns once the tensors may change. Raises errors of copying them, and no later error."""
        self._settled.wait()
        if not self._copied and self._error is not None:
            raise self._error

    def wait_begun(self, timeout_s: float | None = None) -> Version:
        """Returns the version once the hub has named it: its branch and step. Raises RetryableError when it is not
        named in time, and the errors of ``wait_durable`` for one that was never begun.
        """
        if not self._begun.wait(timeout_s):
            raise RetryableError(f"step {self.step} was not begun by the hub within {timeout_s:g} s")
        if self.version is None:
            assert self._error is not None
            raise self._error
        return self.version

    def wait_durable(self, timeout_s: float | None = None) -> Version:
        """Returns the version once it is stored at the hub. Raises RetryableError when the version was aborted (the
        message names the lost rank or hub) or is not stored in time. Raises any other error that ended the version. An
        aborted version is stored nowhere, and the next may be published.
        """
        if not self._over.wait(timeout_s):
            raise RetryableError(f"step {self.step} is not stored at the hub within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self.version is not None
        return self.version

    def wait_live(self, fraction: float = 0.9, timeout_s: float = 60.0) -> dict[str, Version]:
        """Returns engines (``peer/engine``) with this version or a newer one, and the version of each. They are then at
        least ``fraction`` of all engines that the hub knows, and at least one.

        Raises RetryableError naming the late engines after ``timeout_s``, and the errors of ``wait_durable``.
        """
        if not 0 < fraction <= 1:
            raise UsageError(f"a fraction of {fraction} of the engines: give more than 0 and at most 1")
        deadline = time.monotonic() + timeout_s
        version = self.wait_durable(timeout_s)
        assert self.uplink is not None

        def live_engines(received: Received) -> dict[str, Version] | None:
            there = {name: v for name, (v, _) in received.engines.items() if v is not None and v >= version}
            # A share such as 0.9 × 10 must not become 10 by rounding.
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
        """Returns once the version is stored, aborted or failed."""
        self._over.wait()
