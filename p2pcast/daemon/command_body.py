"""The JSON object sent with an HTTP command. Unknown keys are refused, since a misspelt key would be ignored."""

from __future__ import annotations

from typing import Any

from p2pcast.ground.errors import UsageError


def check_keys(body: dict[str, Any], *known: str) -> None:
    """Raise UsageError, listing them, if ``body`` has keys other than ``known``."""
    if unknown := sorted(map(repr, body.keys() - set(known))):
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise UsageError(f"this command has no key {', '.join(unknown)[:200]}: {takes}")


def flag(body: dict[str, Any], name: str) -> bool:
    """Return the boolean under ``name``; False if it is missing. Raises UsageError."""
    found = body.get(name, False)
    if not isinstance(found, bool):
        raise UsageError(f"{name}: true or false, not {str(found)[:40]!r}")
    return found
