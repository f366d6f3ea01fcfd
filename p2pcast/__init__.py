"""The p2pcast package, and ``Reader`` for programs on a peer's machine.

Importing the package loads nothing else; ``from p2pcast import Reader`` loads what ``Reader`` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pcast.reader import Reader

__all__ = ["Reader"]


def __getattr__(name: str) -> Any:
    if name == "Reader":
        from p2pcast.reader import Reader

        return Reader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
