"""Parts that hub and peer share, and ``Reader`` for programs beside a peer.

``from p2pcast import Reader`` loads what it needs; importing the package alone loads nothing.
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
