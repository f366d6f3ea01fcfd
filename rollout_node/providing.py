"""What a peer gives to the engines beside it: the layout, patches or the shadow itself, a version's small files. And what engines say to it.

Promise: weights are given of versions that are staged here, and of no others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from p2pcast.errors import RetryableError
from p2pcast.store.store import Store
from p2pcast.version import Version
from rollout_node.companions import Lead
from rollout_node.following import Following
from rollout_node.member import Member

logger = logging.getLogger("p2pcast.peer")


class ProvidingOwner(Protocol):
    store: Store
    following: Following
    lead: Lead | None
    member: Member | None


class Providing:
    """A `Provider` for the install socket."""

    def __init__(self, owner: ProvidingOwner) -> None:
        self._owner = owner

    def small_files(self, version: Version) -> Mapping[str, bytes]:
        """By path. Of a version that the store knows nothing of, which began from the base folder, they are that folder's."""
        store, base = self._owner.store, self._owner.following.base
        files = store.small_files(version)
        if not files and base is not None and store.manifest(version) is None:
            return base[0].small_files()
        return files

    def layout_document(self) -> bytes:
        shadow = self._owner.following.shadow
        if shadow is None:
            raise RetryableError("this peer holds no version yet")
        return shadow.layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        found, member = self._owner.following.patches(base, to), self._owner.member
        if member is not None and isinstance(found, Path):
            member.give_shadow(to)
        return found

    def report(self, report: Mapping[str, Any]) -> None:
        logger.debug("engine: %s", dict(report))
        if (lead := self._owner.lead) is not None:
            lead.heard(report)
        if (member := self._owner.member) is not None:
            member.report(report)
