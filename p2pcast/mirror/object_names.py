"""Names and sizes of a mirror's objects (docs/guides/mirror.md). It does no I/O.

Guarantee: a name is parsed only in its canonical form, which is the one that ``str`` returns. All other names belong to
other programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

FORMAT = "p2pcast-1"
SLICE_BYTES = 8 * limits.MIB
"""Bytes of an artifact's log per object: the most that an aborted upload loses, and for which live traffic waits. It is
a multiple of every piece size.
"""
KEY = "key"
READY = "ready/"
TAIL = "tail/"
LOG = "log/"
_ANCHOR = "anchor"
_VERSION = re.compile(r"(\d{10})\.(\d{19})", re.ASCII)
_MARKER = re.compile(r"ready/(\d{10}\.\d{19})-(anchor|\d{10}\.\d{19})-([0-9a-f]{32})", re.ASCII)
_SLICE = re.compile(r"log/([0-9a-f]{32})/(\d{8})", re.ASCII)
_TAIL = re.compile(r"tail/([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object in a listing. ``modified_s``: Unix seconds by the store's clock. ``tag``: the store's identifier of the
    object's contents (ETag).
    """

    name: str
    size: int
    modified_s: float
    tag: str | None = None


def run_folder(run: bytes) -> str:
    """Return the folder of a run's objects, below the mirror's prefix."""
    return f"{FORMAT}/{run.hex()}/"


class ReadyMarker(NamedTuple):
    """A marker which says that an artifact is complete on the mirror. ``base``: None for an anchor. The object's
    contents are signed; its name proves nothing.
    """

    version: Version
    base: Version | None
    id: bytes

    def __str__(self) -> str:
        base = _ANCHOR if self.base is None else _padded(self.base)
        return f"{READY}{_padded(self.version)}-{base}-{self.id.hex()}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        found = _MARKER.fullmatch(name)
        if found is None:
            return None
        version, base = _version(found[1]), None if found[2] == _ANCHOR else _version(found[2])
        if version is None or (base is None) != (found[2] == _ANCHOR) or (base is not None and base >= version):
            return None
        return cls(version, base, bytes.fromhex(found[3]))


def _padded(version: Version) -> str:
    """Return a version as text that sorts in version order."""
    return f"{version.branch:010}.{version.step:019}"


def _version(text: str) -> Version | None:
    found = _VERSION.fullmatch(text)
    assert found is not None
    branch, step = int(found[1]), int(found[2])
    return Version(branch, step) if branch <= limits.MAX_BRANCH and step <= limits.MAX_STEP else None


def tail_name(artifact: bytes) -> str:
    return f"{TAIL}{artifact.hex()}"


def tail_of(name: str) -> bytes | None:
    """Return the artifact whose tail has this name; None for other names."""
    found = _TAIL.fullmatch(name)
    return None if found is None else bytes.fromhex(found[1])


def slice_name(artifact: bytes, number: int) -> str:
    return f"{LOG}{artifact.hex()}/{number:08}"


def slice_of(name: str) -> tuple[bytes, int] | None:
    """Return the artifact and number of the slice with this name; None for other names."""
    found = _SLICE.fullmatch(name)
    return None if found is None else (bytes.fromhex(found[1]), int(found[2]))


def slices(log_bytes: int) -> int:
    return -(-log_bytes // SLICE_BYTES)


def slice_bytes(log_bytes: int, number: int) -> int:
    """Size of a slice in bytes, which is SLICE_BYTES for all except the last."""
    return min(SLICE_BYTES, log_bytes - number * SLICE_BYTES)


def most_tail_bytes(pieces: int, batches: int, cells: int) -> int:
    """Return an upper bound in bytes on the tail of an artifact with these counts. Raises IntegrityError if the bound
    exceeds MAX_TAIL_BYTES.
    """
    most = limits.MAX_LAYOUT_BYTES + limits.MAX_MANIFEST_BYTES + limits.MIB + 40 * pieces + 512 * batches + 64 * cells
    if most > limits.MAX_TAIL_BYTES:
        raise IntegrityError(f"a tail for {pieces} pieces in {batches} batches is larger than any may be")
    return most
