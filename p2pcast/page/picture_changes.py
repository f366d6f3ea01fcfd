"""Changes from one picture of a run to the next. Pure.

A change: ``{"set": {key: value, …}, "peers": {name: row or null, …}}``; a null row: the peer is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Document:
    """``apply(old, changes(old, new))`` is ``new``, for pictures with the same keys."""
    before, after = old["peers"], new["peers"]
    rows = {name: row for name, row in after.items() if before.get(name) != row}
    gone = {name: None for name in before if name not in after}
    fields = {key: value for key, value in new.items() if key != "peers" and old.get(key) != value}
    return {"set": fields, "peers": rows | gone}


def apply(old: Mapping[str, Any], change: Mapping[str, Any]) -> Document:
    """As the page does."""
    rows = {name: row for name, row in (old["peers"] | change["peers"]).items() if row is not None}
    return {**old, **change["set"], "peers": rows}
