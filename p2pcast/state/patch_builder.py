"""Builds a finished patch against the shadow from a delta's cells.

Guarantee: a patch returned by ``finish`` leads from exactly the shadow's state to exactly the state sealed by the
manifest, cell by cell and as a whole. Until the shadow applies the patch, only the patch file is written.
"""

from __future__ import annotations

import threading
from pathlib import Path

from p2pcast.artifact.assembly import Placed
from p2pcast.codec.cell import Patch, decode
from p2pcast.codec.dense_codec import Buffer
from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.shadow import Shadow


class PatchBuilder:
    """Builds the patch of one delta. ``decode`` may be called from several threads, in any order of cells.

    The shadow must stay at ``base`` until ``finish``. Raises IntegrityError if the delta is not against the shadow's
    version.
    """

    def __init__(self, shadow: Shadow, layout: Layout, version: Version, base: Version, writer: PatchWriter) -> None:
        if layout != shadow.layout:
            raise IntegrityError(f"version {version} is of another layout than the shadow {shadow.folder}")
        self.shadow = shadow
        self.version = version
        self.base = base
        self._writer = writer
        self._lock = threading.Lock()
        self._growth = 0
        self._check_base()

    def decode(self, placed: Placed, payload: Buffer) -> Patch:
        """Decode one cell against the shadow, verify it before and after, and add it to the patch.

        Raises IntegrityError (wrong base, corrupt shadow, damaged payload, repeated cell) and LocalError (no space for
        the patch).
        """
        cell = self.shadow.layout.cells[placed.cell]
        mark = self.shadow.mark(cell.index)
        if placed.before != mark:
            raise IntegrityError(
                f"wrong base: version {self.version} is against digest {placed.before:016x} of cell {cell.index}, "
                f"the shadow holds {mark:016x} ({self.base})"
            )
        patch = decode(cell, placed.codec, payload, self.shadow.words(cell), placed.before, placed.after)
        self._writer.add(patch)
        with self._lock:
            self._growth += placed.after - placed.before
        return patch

    def finish(self, state: int) -> Path:
        """Give the patch its name and return its path, after every cell of the directory has gone through ``decode``.

        ``state``: the manifest's digest of the whole state. If the cells lead to a different digest, the patch is
        removed and IntegrityError raised.
        """
        try:
            self._check_base()
            reached = (self.shadow.state_digest + self._growth) & MASK
            if reached != state:
                raise IntegrityError(
                    f"version {self.version}: its cells lead to state {reached:016x}, its manifest says {state:016x}"
                )
            self._writer.finish(state)
        except BaseException:
            self.abandon()
            raise
        return self._writer.path

    def abandon(self) -> None:
        """Remove the unfinished patch. Further calls do nothing."""
        self._writer.abandon()

    def _check_base(self) -> None:
        held = self.shadow.version
        if held != self.base:
            raise IntegrityError(f"wrong base: version {self.version} is against {self.base}, the shadow holds {held}")
