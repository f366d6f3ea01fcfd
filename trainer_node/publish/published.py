"""``Published``, the facts of a sealed version."""

from __future__ import annotations

from dataclasses import dataclass

from p2pcast.codec.codec_prediction import Choice
from p2pcast.ground.version import Version


@dataclass(frozen=True, slots=True)
class Published:
    """A sealed version. ``encode_s``: seconds from the first cell to the last. Sizes are in bytes; ``changed`` and
    ``params`` count words. ``choice``: the version's codec, or None for a whole state.
    """

    version: Version
    kind: str
    bytes: int
    dense_bytes: int
    changed: int
    params: int
    encode_s: float
    choice: Choice | None = None
