"""``p2pcast verify --live``: do engines hold, in their own memory, the version that they say they use?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console
from p2pcast.cli.status import ask, bearer_token, daemon_url
from p2pcast.errors import IntegrityError, RetryableError
from p2pcast.trust import bearer

AUDIT_S = 1860.0
"""A little longer than a peer takes at most."""
_SHOWN = 10


def verify_live(
    hub: str | None, state: Path | None, peer: str | None, engine: str | None, bearer_file: Path | None, as_json: bool
) -> None:
    """Ask the peer at ``peer`` or of the state folder, or else every peer of the run, and compare with the hub too where one is named."""
    known: dict[str, Any] = {}
    if peer is None and state is None:
        url = daemon_url(hub, None)
        # The hub's opens every peer's, made over for it.
        hubs = bearer_token(url, None, bearer_file)
        status = ask(url, "/status", token=hubs)
        known = status.get("digests") or {}
        audited = [_ask_listed(p, engine, hubs) for p in status.get("peers", []) if _has(p, engine)]
    else:
        if hub is not None:
            known = ask(daemon_url(hub, None), "/status").get("digests") or {}
        audited = [
            ask(daemon_url(peer, state), "/verify", {"engine": engine}, timeout_s=AUDIT_S, state=state, bearer_file=bearer_file)
        ]
    rows = [{"peer": a["name"], **row, "faults": _faults(row, known)} for a in audited for row in a["engines"]]
    if not rows:
        raise RetryableError(f"no peer has an engine {engine!r}" if engine else "no peer has joined")
    if as_json:
        click.echo(json.dumps({"ok": not any(r["faults"] for r in rows), "engines": rows}))
    else:
        console().print(_table(rows))
    if wrong := [f"{r['name']} at {r['peer']}: {fault}" for r in rows for fault in r["faults"]]:
        raise IntegrityError("not what it should be:\n  " + "\n  ".join(wrong))


def _has(listed: dict[str, Any], engine: str | None) -> bool:
    return engine is None or any(e["name"] == engine for e in listed.get("engines") or [])


def _ask_listed(listed: dict[str, Any], engine: str | None, hubs: str | None) -> dict[str, Any]:
    """A peer where the hub says it is. Raises RetryableError when somebody else answers there: its loopback may not be ours."""
    name, where = listed["name"], listed.get("http")
    if where is None:
        raise RetryableError(f"peer {name} does not say where its HTTP side is; ask it with --peer URL")
    token = None if hubs is None else bearer.of_node(hubs, bytes.fromhex(listed["node"]))
    status = ask(f"http://{where}", "/status", token=token)
    if status.get("node") != listed["node"]:
        raise RetryableError(
            f"another daemon than peer {name} answers at {where}; run this on that peer's host, with --state DIR"
        )
    return ask(f"http://{where}", "/verify", {"engine": engine}, timeout_s=AUDIT_S, token=token)


def _faults(row: dict[str, Any], known: dict[str, Any]) -> list[str]:
    faults = [f"tensor {name!r} is not that of version {row['version']}" for name in row["wrong"][:_SHOWN]]
    if len(row["wrong"]) > _SHOWN:
        faults.append(f"… and {len(row['wrong']) - _SHOWN} more tensors")
    if known and known.get(row["version"], row["state"]) != row["state"]:
        faults.append(f"its peer takes {row['state']} for version {row['version']}, the hub knows {known[row['version']]}")
    return faults


def _table(rows: list[dict[str, Any]]) -> Table:
    out = Table("engine", "at", "version", "state", "weights")
    for row in rows:
        verdict = f"{len(row['wrong'])} tensors differ" if row["wrong"] else "as they should be"
        if row["unknown"]:
            verdict += f", but for {len(row['unknown'])} tensors that can't be read from here, {row['unknown'][0]} first"
        out.add_row(row["name"], row["peer"], row["version"], row["state"], verdict)
    return out
