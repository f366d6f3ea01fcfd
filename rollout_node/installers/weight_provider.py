"""The peer's data for the engines on its host: the layout, patches or the shadow itself, and a version's small files.

Guarantee: only weights of the staged version are given out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from p2pcast.ground.version import Version
from p2pcast.sparse import budget_schedule
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.shadow.base_folder import BaseFolder
from rollout_node.shadow.shadow_state import HeldShadow

logger = logging.getLogger("p2pcast.peer")

CONFIG = "config.json"


class WeightProvider:
    """``before_dense`` is called before an engine gets the whole shadow, and raises P2PCastError to refuse."""

    def __init__(
        self,
        store: ArtifactStore,
        base: BaseFolder | None,
        shadow: HeldShadow,
        before_dense: Callable[[Version], None] = lambda version: None,
    ) -> None:
        self.on_report: list[Callable[[Mapping[str, Any]], None]] = []
        """Called with each rank's report."""
        self._store = store
        self._base = base
        self._shadow = shadow
        self._before_dense = before_dense
        self._schedules_of_base: dict[Version, bytes] = {}
        """Like ``schedule_names``, for a version without a manifest."""

    def small_files(self, version: Version) -> Mapping[str, bytes]:
        """A version's small files by path. A version without a manifest in the store is the base folder's."""
        files = self._store.small_files(version)
        if not files and self._base is not None and self._store.manifest(version) is None:
            files = self._base.small_files()
        return self._shadow.files(files)

    def schedule(self, version: Version) -> bytes | None:
        """The sparse-attention budget file of ``version``, unread; None if the version's attention is dense. Raises
        RetryableError while the file is not here.
        """
        if self._store.manifest(version) is not None:
            contents = self._store.small_file(version, budget_schedule.FILE)
        else:
            contents = self.small_files(version).get(budget_schedule.FILE)
            self._schedules_of_base = {} if contents is None else {version: blake3(contents).digest()}
        return contents if contents is None or len(contents) <= budget_schedule.MAX_FILE_BYTES else b""

    def config(self, version: Version) -> bytes | None:
        """The version's ``config.json`` in the form for engines; None if it has none. Raises RetryableError while the
        file is not here.
        """
        if self._store.manifest(version) is None:
            return self.small_files(version).get(CONFIG)
        contents = self._store.small_file(version, CONFIG)
        return None if contents is None else self._shadow.files({CONFIG: contents})[CONFIG]

    def schedule_names(self) -> Mapping[Version, bytes]:
        """BLAKE3 of ``schedule``'s file, by version; results identify the schedule by this hash."""
        return {**self._schedules_of_base, **self._store.hashes_of(budget_schedule.FILE)}

    def layout_document(self) -> bytes:
        return self._shadow.layout_document()

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        """Return the patch files from ``base`` to ``to``, in order, or else the shadow's file, which stays at ``to``
        until the prepare phase is over. Raises P2PCastError unless ``to`` is staged.
        """
        found = self._shadow.patches(base, to)
        if isinstance(found, Path):
            self._before_dense(to)
        return found

    def report(self, report: Mapping[str, Any]) -> None:
        logger.debug("engine: %s", dict(report))
        for receive in self.on_report:
            receive(report)
