"""Artifacts: an anchor or a delta as an append-only log with signed batches and a manifest
(docs/formats/delta-format.md, sections 4 to 6).
"""

from p2pcast.artifact.assembly import Assembly, Placed
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import ANCHOR, DELTA, Batch, CellEntry, FileEntry, Manifest, Open, run_id

__all__ = [
    "ANCHOR",
    "DELTA",
    "Assembly",
    "Batch",
    "CellEntry",
    "FileEntry",
    "Manifest",
    "Open",
    "Packer",
    "Placed",
    "RunKey",
    "run_id",
]
