"""Staging of a version at all ranks of a vLLM engine, beside the live weights, and the proof of what they build on.

Promise: a delta is prepared only on the version that it needs. All ranks together prove that: they digest their live
values at the changed places, and the sum must be the patch's. If the live weights differ from the version that the
ranks named, the engine is paused (``EnginePause.distrust``) and the whole state is staged instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from rollout_node.in_engine import weight_audit
from rollout_node.installers.install_socket import Report
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.rank_reports import FalseReportError, Ranks, common_version

log = logging.getLogger("p2pcast.peer")


class RankPreparation:
    """Writes ``state.marks``. ``layout_document``: the run's layout. ``distrust``: ``EnginePause.distrust``."""

    def __init__(
        self,
        ranks: Ranks,
        state: InstallState,
        layout_document: Callable[[], bytes],
        distrust: Callable[[], Awaitable[None]],
    ) -> None:
        self._ranks, self._name, self._state = ranks, ranks.name, state
        self._layout_document, self._distrust = layout_document, distrust
        self._layout: tuple[bytes, Layout] | None = None

    async def prepare(self, version: Version, deadline_s: float) -> list[Report]:
        """Stage at every rank. If the live weights differ from the version that the ranks named, stage the whole
        state.
        """
        if not self._state.uncertain:
            try:
                return await self._prepare_once(version, deadline_s, whole=False)
            except IntegrityError as error:
                if not isinstance(error, FalseReportError) and common_version(await self._ranks.init()) is not None:
                    raise  # the version is at fault: the engine keeps its present version
                log.error("%s", error)
                await self._distrust()
        return await self._prepare_once(version, deadline_s, whole=True)

    async def _prepare_once(self, version: Version, deadline_s: float, *, whole: bool) -> list[Report]:
        reports = await self._ranks.command("prepare", version, deadline_s, whole=whole)
        self._state.marks = {r["rank"]: r["mark"] for r in reports}
        sparse = [r for r in reports if r["install"] == "sparse"]
        if len({r["from"] for r in sparse}) > 1 or len({str(r["expected"]) for r in sparse}) > 1:
            raise FalseReportError(f"{self._name}: the ranks don't build {version} on the same version")
        if sparse and len(sparse) == len(reports):
            await self._check_base(sparse)
        return reports

    async def _check_base(self, sparse: Sequence[Report]) -> None:
        """Compare the live values of all ranks together with those that the patch changes."""
        entries = [entry for r in sparse for entry in r["grown"]]
        expected = dict(sparse[0]["expected"])
        wrong, _ = await asyncio.to_thread(weight_audit.compare, self.layout(), entries, expected)
        if wrong:
            held = sparse[0]["from"]
            raise FalseReportError(
                f"{self._name}: {wrong[0]} ({len(wrong)} tensors in all): the ranks' live values differ from {held}"
            )

    def layout(self) -> Layout:
        """The run's."""
        document = self._layout_document()
        if self._layout is None or self._layout[0] != document:
            self._layout = document, Layout.from_document(document)
        return self._layout[1]
