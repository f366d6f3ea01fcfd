"""Settings of the backend: ``rollout.checkpoint_engine.engine_kwargs.p2pcast`` in verl's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from p2pcast.ground.errors import UsageError

WHERE = "rollout.checkpoint_engine.engine_kwargs.p2pcast"
MAX_S = 3600.0
"""Longest lease of a peer, and longest wait at one, in seconds."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``hub``: HOST:PORT. ``peer``: state folder of the peer on each rollout machine; ``~`` and ``$VARIABLE`` are
    expanded on that machine. ``token_file``, ``base``, ``plaintext``: as for ``Publisher``, read by actor rank 0 alone.
    ``wait_s``: time for a version to be stored at the hub, to be staged at a peer, and to be installed. ``hold_s``:
    time for one tensor's installation, and for the end of a sync after the last tensor. The peer of a worker that was
    killed stays at its version for so long.
    """

    hub: str
    peer: str
    token_file: str | None = None
    base: str | None = None
    plaintext: bool = False
    wait_s: float = 600.0
    hold_s: float = 60.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises UsageError naming the key."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in given:
            if key not in fields:
                raise UsageError(f"{WHERE}.{key} is unknown: the keys are {', '.join(fields)}")
        for key in ("hub", "peer"):
            if not isinstance(given.get(key), str) or not given[key]:
                example = "HOST:PORT of `p2pcast seed`" if key == "hub" else "the state folder of the host's peer"
                raise UsageError(f"{WHERE}.{key} is missing or no text: give {example}")
        for key in ("token_file", "base"):
            if not isinstance(given.get(key), str | None):
                raise UsageError(f"{WHERE}.{key}={given[key]!r} is no path")
        if not isinstance(given.get("plaintext", False), bool):
            raise UsageError(f"{WHERE}.plaintext={given['plaintext']!r} is neither true nor false")
        for key in ("wait_s", "hold_s"):
            value = given.get(key, 1.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_S:
                raise UsageError(f"{WHERE}.{key}={value!r} is no number of seconds from 0 to {MAX_S:g}")
        return cls(**given)
