"""The order to switch a whole engine by one command, and the proof that a rank has carried it out.

The engine resumes only if every rank has proved the requested version while the caller is still waiting.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SwitchOrder:
    """``marks``: rank (in decimal) → the mark expected from reading back. ``ours``: whether an existing pause may be
    ended. ``until_unix_s``: the deadline of the caller, which is on this host.

    ``clear_cache``: running requests recompute their keys and values, and cached ones from older weights are dropped.
    """

    version: str
    nonce: str
    marks: dict[str, int]
    clear_cache: bool
    ours: bool
    until_unix_s: float

    @property
    def expired(self) -> bool:
        return time.time() > self.until_unix_s

    def is_proved_by(self, report: Mapping[str, Any] | None) -> bool:
        """Whether a rank's report proves that it holds the version. ``report``: None if the rank failed."""
        if report is None or report["error"] is not None or report["held"] != self.version:
            return False
        mark = report.get("mark")
        return mark is not None and mark == self.marks.get(str(report["rank"]))
