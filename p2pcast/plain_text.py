"""Values from other machines, and names of files, as text for people."""

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


def decodable(text: str) -> str:
    """``text``, in which bytes of a path that are not UTF-8 became escapes such as ``\\udcff``. Any encoder takes the
    result.
    """
    return text.encode(errors="backslashreplace").decode()
