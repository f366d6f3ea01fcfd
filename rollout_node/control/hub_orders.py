"""The hub's orders on commits: when engines switch, the target version, and the version that the shadow must not pass.

Guarantee: every order is saved, so that the peer can start without the hub (``rollout_node.control.saved_hub_state``).
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
    """Only the hub's messages and ``recall`` change the orders; everything else reads them."""

    def __init__(self, saved: SavedOrders) -> None:
        self.commits = "auto"
        """When engines switch: auto, manual or barrier."""
        self.target: Version | None = None
        """The version to which engines switch, unless they switch automatically."""
        self.hold: Version | None = None
        """The shadow moves no further than this version."""
        self.target_observers: Observers[[]] = Observers()
        """Notified when the target may have changed."""
        self._saved = saved

    def recall(self) -> None:
        """Restore the orders of an earlier process, for a start without the hub."""
        self.commits, self.target, self.hold = self._saved.commit, self._saved.target, self._saved.hold

    def welcome(self, commits: str, target: Version | None) -> None:
        """Apply the orders in a WELCOME. Only a barrier holds shadows back."""
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
