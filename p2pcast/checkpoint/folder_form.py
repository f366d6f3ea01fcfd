"""Names of step folders, and the marker files in them which show that a folder is complete.

A training framework and the programs that read its checkpoints agree on both: ``step_7`` with ``STABLE``, or
``weight_v000007`` without a marker. The hub reads folders of a given form, and a peer writes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Self

from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STEP

MOST_CHARACTERS: Final = 100
MOST_DIGITS: Final = len(str(MAX_STEP))
_PATTERN: Final = re.compile(r"([A-Za-z0-9_-]*)\{step(?::0(\d{1,2}))?\}([A-Za-z0-9_-]*)", re.ASCII)

MarkerStyle = Literal["STABLE", "prime-rl", "none"]


@dataclass(frozen=True, slots=True)
class StepNames:
    """``prefix``, the step in decimal, and ``suffix``. ``width``: least number of digits, padded with zeros."""

    prefix: str = "step_"
    width: int = 1
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``step_{step}`` or ``weight_v{step:06}``. Raises UsageError."""
        found = _PATTERN.fullmatch(text)
        width = int((found and found[2]) or 1)
        if found is None or not 1 <= width <= MOST_DIGITS or len(text) > MOST_CHARACTERS:
            raise UsageError(
                f"{text!r} is no pattern of folder names: write letters, digits, '_' and '-' around one {{step}}, or "
                f"around {{step:06}} for steps of at least 6 digits (at most {MOST_DIGITS})"
            )
        return cls(found[1], width, found[3])

    def name(self, step: int) -> str:
        return f"{self.prefix}{step:0{self.width}}{self.suffix}"

    def step_of(self, name: str) -> int | None:
        """Return the step in a folder's name; None if it does not match. A ``width`` of 1 allows leading zeros."""
        digits = name.removeprefix(self.prefix).removesuffix(self.suffix)
        if f"{self.prefix}{digits}{self.suffix}" != name or not (digits.isascii() and digits.isdigit()):
            return None
        step = int(digits) if len(digits) <= MOST_DIGITS else MAX_STEP + 1
        fits = self.width == 1 or self.name(step) == name
        return step if step <= MAX_STEP and fits else None

    def __str__(self) -> str:
        return f"{self.prefix}{{step{f':0{self.width}' if self.width > 1 else ''}}}{self.suffix}"


@dataclass(frozen=True, slots=True)
class FolderMarkers:
    """Files which show that a folder is complete. ``last``: written after all others; a peer writes the version to it.
    ``before``: empty files written before it. ``required``: a folder without ``last`` is never complete.
    """

    last: str
    before: tuple[str, ...] = ()
    required: bool = False

    def __contains__(self, name: object) -> bool:
        return name == self.last or name in self.before


STABLE: Final = "STABLE"
MARKERS: Final[dict[MarkerStyle, FolderMarkers]] = {
    "STABLE": FolderMarkers(STABLE),
    # The stages of a broadcast in prime-rl since its pull request 3357.
    "prime-rl": FolderMarkers(".finished", (".sender_ready", ".receiver_ready", ".started"), required=True),
    # Readers expect no marker. The peer's own record of the version is hidden.
    "none": FolderMarkers(".p2pcast-version"),
}


@dataclass(frozen=True, slots=True)
class FolderForm:
    names: StepNames = StepNames()
    marker: FolderMarkers = MARKERS["STABLE"]


DEFAULT: Final = FolderForm()
