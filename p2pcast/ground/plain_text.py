"""Values from other machines, and names of files, as text for people; and text that people wrote."""

from __future__ import annotations

import codecs

MAX_SHOWN = 300
"""Most characters shown of one value."""


def shown_text(value: object) -> str:
    """``value`` on one line, without control characters for the terminal."""
    try:
        said = str(value)
    except (ValueError, RecursionError):
        said = "?"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said[:MAX_SHOWN])


def written_text(contents: bytes) -> str:
    """The text of a file that a person may have written: UTF-8, or UTF-16 behind its byte order mark, as PowerShell
    writes it. Raises UnicodeDecodeError.
    """
    utf_16 = contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return contents.decode("utf-16" if utf_16 else "utf-8-sig")


def decodable(text: str) -> str:
    """``text``, in which bytes of a path that are not UTF-8 became escapes such as ``\\udcff``. Any encoder takes the
    result.
    """
    return text.encode(errors="backslashreplace").decode()
