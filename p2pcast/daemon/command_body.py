"""The JSON object of a daemon's HTTP command. A misspelt key would count as left out, so other keys are refused."""

from __future__ import annotations

from typing import Any

from p2pcast.ground.errors import UsageError


def check_keys(body: dict[str, Any], *known: str) -> None:
    """Raises UsageError, which names the other keys of ``body``."""
    if unknown := sorted(map(repr, body.keys() - set(known))):
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise UsageError(f"this command has no key {', '.join(unknown)[:200]}: {takes}")


def flag(body: dict[str, Any], name: str) -> bool:
    """Left out, it is false. Raises UsageError."""
    found = body.get(name, False)
    if not isinstance(found, bool):
        raise UsageError(f"{name}: true or false, not {str(found)[:40]!r}")
    return found
