"""A version of the weights: (branch, step), written ``branch.step``, ordered by branch first."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, UsageError

NO_VERSION: Final = "none"
"""The label of an engine's weights that no peer has installed into this process."""
_TEXT = re.compile(r"(?:(\d{1,10})\.)?(\d{1,19})", re.ASCII)


class Version(NamedTuple):
    """A version of the weights. Versions are ordered by branch first, then by step."""

    branch: int
    step: int

    def __str__(self) -> str:
        return f"{self.branch}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Parse ``branch.step``, or just ``step`` for branch 0. Raises UsageError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UsageError(f"{text[:40]!r} is not a version: write BRANCH.STEP, as in 0.12")
        version = cls(int(match[1] or 0), int(match[2]))
        if version.branch > limits.MAX_BRANCH or version.step > limits.MAX_STEP:
            raise UsageError(
                f"{text!r} is not a version: a branch is at most {limits.MAX_BRANCH}, a step at most {limits.MAX_STEP}"
            )
        return version

    @classmethod
    def of(cls, pair: Any) -> Version:
        """Convert a ``[branch, step]`` pair from a message. Raises IntegrityError."""
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not all(type(x) is int for x in pair)
            or not (0 <= pair[0] <= limits.MAX_BRANCH and 0 <= pair[1] <= limits.MAX_STEP)
        ):
            raise IntegrityError("a version is [branch, step], two integers in range")
        return cls(pair[0], pair[1])
