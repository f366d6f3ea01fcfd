"""Providers start and stop workers for the fleet's controller.

A provider has workers of one kind and price. It starts a worker with a command or by scaling a cluster, never by
itself. A worker is stopped after draining: the ledger gives it no more leases, and its leases are finished.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Protocol

from p2pcast.ground.errors import LocalError, UsageError

FORMS = "static:NAME,NAME,…, exec:START COMMAND -- STOP COMMAND [-- LIST COMMAND], kubernetes:NAMESPACE/DEPLOYMENT"


class Provider(Protocol):
    """All methods raise LocalError with the provider's own message. ``changes``: whether the provider can start and
    stop workers.
    """

    changes: bool

    async def running(self) -> Sequence[str]:
        """Names of workers that are running or starting."""
        ...

    async def start(self, name: str) -> None:
        """Start one worker. A cluster may give it a different name."""
        ...

    async def stop(self, name: str) -> None:
        """Stop a worker that has been drained."""
        ...


def provider_of(text: str) -> Provider:
    """Return the provider that ``text`` describes (``FORMS``). Raises UsageError, or LocalError without its package."""
    form, _, rest = text.partition(":")
    if form == "static":
        return StaticProvider([name.strip() for name in rest.split(",")])
    if form == "exec":
        return _commands(rest)
    if form == "kubernetes":
        from trainer_node.scheduling.kubernetes_provider import KubernetesProvider, configured

        namespace, slash, deployment = rest.partition("/")
        if not (namespace and slash and deployment):
            raise UsageError(f"provider {text!r}: write kubernetes:NAMESPACE/DEPLOYMENT")
        return KubernetesProvider(configured(), namespace, deployment)
    raise UsageError(f"provider {text!r}: write one of {FORMS}")


def _commands(text: str) -> Provider:
    from trainer_node.scheduling.command_provider import CommandProvider

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"provider exec: {error} in {text!r}") from None
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UsageError(f"provider exec:{text}: write exec:START COMMAND -- STOP COMMAND [-- LIST COMMAND]")
    return CommandProvider(parts[0], parts[1], parts[2] if len(parts) > 2 else None)


class StaticProvider:
    """Workers that a person starts: the fleet's controller measures them but changes nothing."""

    changes = False

    def __init__(self, names: Sequence[str]) -> None:
        if not all(names) or len(set(names)) != len(names):
            raise UsageError(f"provider static: worker names must be there, each once: {', '.join(names)!r}")
        self._names = tuple(names)

    async def running(self) -> Sequence[str]:
        return self._names

    async def start(self, name: str) -> None:
        raise LocalError(f"worker {name} is started by hand: its provider is static")

    async def stop(self, name: str) -> None:
        raise LocalError(f"worker {name} is stopped by hand: its provider is static")
