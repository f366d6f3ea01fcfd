"""The digests of a version's weights, kept after the shadow has moved on (docs/formats/delta-format.md, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pcast.codec.layout import Layout


@dataclass(frozen=True, slots=True)
class VersionDigests:
    """A state's layout and the digest of each of its cells (u64). ``signed``: for a quantised state, the digest of the
    version from which it was computed.
    """

    layout: Layout
    cells: npt.NDArray[Any]
    signed: int | None = None

    @property
    def state(self) -> int:
        """The version's digest, as signed by the hub."""
        return self.signed if self.signed is not None else int(self.cells.sum(dtype=np.uint64))

    def tensors(self) -> dict[int, int]:
        """Each tensor's digest by tensor number, which is the sum of its cells' digests."""
        sums = np.zeros(len(self.layout.tensors), np.uint64)
        np.add.at(sums, np.array([c.tensor for c in self.layout.cells], np.intp), self.cells)
        return dict(enumerate(sums.tolist()))
