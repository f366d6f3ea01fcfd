"""Makes values from other machines and file names safe to show, and reads text that people wrote."""

from __future__ import annotations

import codecs

MAX_SHOWN = 300
"""Maximum number of characters shown of a value."""


def shown_text(value: object) -> str:
    """Return ``value`` as one line of text, without terminal control characters."""
    try:
        said = str(value)
    except (ValueError, RecursionError):
        said = "?"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said[:MAX_SHOWN])


def written_text(contents: bytes) -> str:
    """Decode a file that a person may have written: UTF-8, or UTF-16 with a byte order mark, as PowerShell writes it.
    Raises UnicodeDecodeError.
    """
    utf_16 = contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return contents.decode("utf-16" if utf_16 else "utf-8-sig")


def decodable(text: str) -> str:
    """Return ``text`` with the non-UTF-8 bytes of a path written as escapes such as ``\\udcff``, so that any encoder
    accepts it.
    """
    return text.encode(errors="backslashreplace").decode()
