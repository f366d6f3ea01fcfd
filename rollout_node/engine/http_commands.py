"""The peer's HTTP commands: ``POST /commit`` (``--driver external``) and ``POST /verify``.

Guarantees of ``commit``:

- It returns once every engine of the peer serves the version.
- If they already do, it returns at once.
- Calls for the same version share the work.

The shadow stays at a version while a caller waits for it. After the last caller has left, no engine starts to switch,
because the caller may have resumed the engines meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from p2pcast.daemon.command_body import check_keys
from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from rollout_node.engine.commit_permission import CommitRequests
from rollout_node.engine.runner import Runner
from rollout_node.installers.installer import Driver
from rollout_node.shadow.shadow_state import HeldShadow

Document = dict[str, Any]

NEWEST = "newest"
COMMIT_S = 60.0
MAX_COMMIT_S = 3600.0
"""Longest time for which a caller may hold the shadow still, in seconds."""
VERIFY_S = 1800.0
"""Time limit for an audit, which reads the whole model: 140 GB at 80 MB/s."""


class HttpCommands:
    """``runners``: one per engine. ``changed`` rings whenever an engine's state may have changed."""

    def __init__(
        self, runners: Sequence[Runner], shadow: HeldShadow, requests: CommitRequests, driver: Driver, changed: Wakeup
    ) -> None:
        self._runners = runners
        self._shadow = shadow
        self._requests = requests
        self._driver = driver
        self._changed = changed

    async def commit(self, body: Document) -> Document:
        """Commit ``{"version": "b.s" | "newest", "timeout_s": 60}``. Raises UsageError, RefusedError (the version is
        not staged here), RetryableError (timeout) and LocalError (an engine rejects the version).
        """
        check_keys(body, "version", "timeout_s")
        if self._driver != "external":
            raise UsageError("this peer commits automatically; start the peer with --driver external for this command")
        asked = body.get("version")
        if not isinstance(asked, str):
            raise UsageError('name the version: {"version": "BRANCH.STEP"} or {"version": "newest"}')
        version = None if asked == NEWEST else Version.parse(asked)
        timeout_s = _seconds(body.get("timeout_s", COMMIT_S))
        runners = self._runners
        if not runners:
            raise RefusedError("this peer has no engines")
        if version is not None and all(r.holds(version) for r in runners):
            return _committed(version, runners)
        try:
            async with asyncio.timeout(timeout_s), self._shadow.held_still() as shadow:
                if shadow is None:
                    raise RefusedError("no version is staged here yet")
                newest = shadow[0]
                if version not in (None, newest):
                    raise RefusedError(f"version {version} is not staged here: {newest} is")
                version = newest
                with self._requests.waiting_for(newest):
                    for runner in runners:
                        runner.wake()
                    await self._live(newest, runners)
        except TimeoutError:
            raise RetryableError(
                f"{_late(version, runners)} after {timeout_s:g} s; ask again, or see /status"
            ) from None
        return _committed(version, runners)

    async def verify(self, body: Document) -> Document:
        """Handle ``{"engine": name | null}``: compare each engine's own weights with the version that it uses. Returns
        the differences, and as ``state`` the version's digest.

        Raises UsageError (no such engine), RefusedError (no version is in use), and whatever the audit raises.
        """
        check_keys(body, "engine")
        name = body.get("engine")
        chosen = [r for r in self._runners if name in (None, r.installer.name)]
        if not chosen:
            known = ", ".join(r.installer.name for r in self._runners) or "none"
            raise UsageError(f"no engine {str(name)[:200]!r} here; there is {known}")
        try:
            async with asyncio.timeout(VERIFY_S):
                audits = [(r.installer.name, await r.audit()) for r in chosen]
        except TimeoutError:
            raise RetryableError(f"the engines did not say within {VERIFY_S:g} s which weights they hold") from None
        engines = [
            {
                "name": n,
                "version": str(a.version),
                "state": f"{state:016x}",
                "wrong": a.wrong,
                "unknown": a.unknown,
                "lacks": list(a.lacks),
            }
            for n, (a, state) in audits
        ]
        return {"ok": not any(a.wrong or a.unknown for _, (a, _) in audits), "engines": engines}

    async def _live(self, version: Version, runners: Sequence[Runner]) -> None:
        """Wait until every engine serves the version or one rejects it. An unreachable engine may come back in time."""
        before = {r: r.steps for r in runners}
        while not all(r.holds(version) for r in runners):
            for runner in runners:
                fault = runner.fault
                if fault is not None and not isinstance(fault, RetryableError) and runner.steps > before[runner]:
                    raise LocalError(f"version {version} is not live: {runner.installer.name}: {runner.error}")
            await self._changed.wait()


def _seconds(given: Any) -> float:
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not math.isfinite(given)
        or not 0 <= given <= MAX_COMMIT_S
    ):
        raise UsageError(f"timeout_s: {str(given)[:40]!r} is not a number of seconds from 0 to {MAX_COMMIT_S:g}")
    return float(given)


def _committed(version: Version, runners: Sequence[Runner]) -> Document:
    shown = [r.status() for r in runners]
    tokens = [e["recomputed_tokens"] for e in shown]
    return {
        "version": str(version),
        "pause_s": _total(max, [e["pause_s"] for e in shown]),
        "recomputed_tokens": _total(sum, tokens),
        "engines": [{k: e[k] for k in ("name", "pause_s", "recomputed_tokens")} for e in shown],
    }


def _total(how: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Combine the values; None if one of them is unknown."""
    return None if None in values else how(values)


def _late(version: Version | None, runners: Sequence[Runner]) -> str:
    late = [r for r in runners if version is None or not r.holds(version)]
    why = "; ".join(
        f"{r.installer.name} is at {r.committed or 'no version'}{f' ({r.error})' if r.error else ''}" for r in late
    )
    return f"version {version or NEWEST} is not live on {len(late)} of {len(runners)} engines ({why})"
