"""All engines of a peer: the versions they serve, and the parts that are notified of changes.

Guarantee: with a barrier, an engine that missed the others' version is unready, even if its weights are good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.wire import messages
from rollout_node.control.hub_orders import HubOrders
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from rollout_node.engine.runner import Runner
from rollout_node.timeline import EngineNow, Timeline


class Engines:
    """``lead``, ``member``: for an engine on several hosts. ``report_soon`` has a report sent to the hub at once."""

    def __init__(
        self,
        runners: Sequence[Runner],
        lead: MultiHostLeader | None,
        member: MultiHostMember | None,
        orders: HubOrders,
        timeline: Timeline,
        report_soon: Callable[[], None],
    ) -> None:
        self.runners = runners
        self.lead = lead
        self.member = member
        self.changed = Wakeup()
        """Rings whenever an engine's state may have changed."""
        self._orders = orders
        self._timeline = timeline
        self._report_soon = report_soon

    # -- versions in use

    @property
    def committed(self) -> Version | None:
        """The oldest version that any engine serves; None if an engine serves no version."""
        served = [runner.committed for runner in self.runners]
        if self.member is not None:
            served.append(self.member.serves)
        return None if not served or None in served else min(v for v in served if v is not None)

    @property
    def oldest(self) -> Version | None:
        """The oldest version from which an engine may still need patches; None if no engine does."""
        known = [v for runner in self.runners if (v := runner.installer.committed) is not None]
        if self.member is not None:
            known.append(self.member.serves or Version(0, 0))
        return min(known, default=None)

    def rows(self) -> list[messages.EngineStatus]:
        """The engines' rows for /status and reports."""
        return [self._row(runner) for runner in self.runners]

    def _row(self, runner: Runner) -> messages.EngineStatus:
        row, late = runner.status(), None
        committed, target = row["committed"], self._orders.target
        barrier = self._orders.commits == "barrier" and row["ready"]
        if barrier and committed is not None and target is not None and Version.parse(committed) < target:
            late = f"version {committed} while the others are at {target}"
        return row | {"started": runner.started, "ready": row["ready"] and late is None, "error": row["error"] or late}

    # -- commands

    def wake(self) -> None:
        """Wake all runners, because they may have work to do."""
        for runner in self.runners:
            runner.wake()

    def on_staged(self, version: Version) -> None:
        """Called once the shadow is at ``version``."""
        if self.lead is not None:
            self.lead.moved(version)
        if self.member is not None:
            self.member.moved()
        self.wake()

    def on_target(self) -> None:
        """Called when the target has moved: engines may have to switch, and those still behind may be unready."""
        self.wake()
        self.announce()

    def distrust(self) -> None:
        """Make all engines unready, because they hold a state that is not the run's, until it has been replaced."""
        for runner in self.runners:
            runner.distrust()

    def settled(self, version: Version) -> bool:
        """Whether no engine still needs the shadow to stay at ``version``."""
        return all(runner.settled(version) for runner in self.runners)

    # -- parts to notify

    def on_changed(self) -> None:
        """Called when an engine's state may have changed."""
        if self.lead is not None:
            led = next(r for r in self.runners if isinstance(r.installer, MultiHostInstaller))
            self.lead.set_serving(led.committed, led.ready)
        self.announce()
        self.changed.notify()

    def announce(self) -> None:
        """Pass the engines' state to the timeline and the hub."""
        now = asyncio.get_running_loop().time()
        self._timeline.observe([self._now(runner) for runner in self.runners], now)
        self._report_soon()

    def _now(self, runner: Runner) -> EngineNow:
        return EngineNow(self._row(runner), runner.commits, runner.report, runner.error)
