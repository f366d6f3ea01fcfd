"""Values from other machines as text for people."""

from __future__ import annotations

MAX_SHOWN = 300
"""Most characters shown of one value."""


def shown_text(value: object) -> str:
    """``value`` on one line, without control characters for the terminal."""
    try:
        said = str(value)
    except (ValueError, RecursionError):
        said = "?"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said[:MAX_SHOWN])
