"""Prompts of a file of JSON lines, each with ``text`` or ``token_ids``."""

from __future__ import annotations

import json
from pathlib import Path

from p2pcast.ground.errors import UsageError


def prompts_of_file(file: Path) -> list[str | list[int]]:
    """Texts as they are, and token ids; none is empty. Raises UsageError that names the line."""
    found: list[str | list[int]] = []
    # ``splitlines`` also divides at separators that JSON leaves as they are inside a text, such as U+2028.
    lines = file.read_text(errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            body = json.loads(line)
            key = "token_ids" if "token_ids" in body else "text"
            one = body[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{file}, line {number}: no JSON document with text or token_ids") from None
        ids = isinstance(one, list) and all(type(token) is int and token >= 0 for token in one)
        if not one or not (isinstance(one, str) if key == "text" else ids):
            raise UsageError(
                f"{file}, line {number}: text is a text, token_ids a list of whole numbers; neither is empty"
            )
        found.append(one)
    if not found:
        raise UsageError(f"{file} has no prompt")
    return found
