"""Sentences about frameworks in versions that their adapter was not tried with. Pure: the caller looks versions up."""

from __future__ import annotations

from collections.abc import Sequence


def untried(framework: str, found: str, tried: Sequence[str]) -> str | None:
    """A warning, or None if ``found`` is one of ``tried``. A tried version is the beginning of others: 1.16 covers
    1.16.2.
    """
    parts = found.split(".")
    if any(parts[: len(one)] == one for one in (text.split(".") for text in tried)):
        return None
    return (
        f"p2pcast's adapter was tried with {framework} {', '.join(tried)}, and {framework} {found} is installed:"
        f" compare the weights of one engine with the trainer's before a long run, or install {framework} {tried[-1]}"
    )
