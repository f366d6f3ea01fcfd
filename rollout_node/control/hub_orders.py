"""The hub's orders on commits: when engines switch, the target version, and the version that the shadow must not pass.

Promise: every order is saved for a start without the hub (``rollout_node.control.saved_hub_state``).
"""

from __future__ import annotations

from typing import Any, Protocol

from p2pcast.ground.observers import Observers
from p2pcast.ground.version import Version


class SavedOrders(Protocol):
    @property
    def commit(self) -> str: ...
    @property
    def target(self) -> Version | None: ...
    @property
    def hold(self) -> Version | None: ...
    def keep(self, **facts: Any) -> None: ...


class HubOrders:
    """``Dispatcher`` alone writes; everything else reads."""

    def __init__(self, saved: SavedOrders) -> None:
        self.commits = "auto"
        """When engines switch: auto, manual or barrier."""
        self.target: Version | None = None
        """The version that engines switch to, unless they switch by themselves."""
        self.hold: Version | None = None
        """The shadow goes no further than this."""
        self.target_observers: Observers[[]] = Observers()
        """Called when the target may have changed."""
        self._saved = saved

    def recall(self) -> None:
        """Take the orders of an earlier process, for a start without the hub."""
        self.commits, self.target, self.hold = self._saved.commit, self._saved.target, self._saved.hold

    def welcome(self, commits: str, target: Version | None) -> None:
        """The orders that come with each WELCOME. Only a barrier holds shadows back."""
        self.commits, self.target = commits, target
        if commits != "barrier":
            self.hold = None
        self._save()

    def hold_at(self, version: Version) -> None:
        self.hold = version
        self._save()

    def commit_to(self, version: Version) -> None:
        self.target = version
        self._save()
        self.target_observers.notify()

    def _save(self) -> None:
        self._saved.keep(
            commit=self.commits,
            target=None if self.target is None else str(self.target),
            hold=None if self.hold is None else str(self.hold),
        )
