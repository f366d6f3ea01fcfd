"""``p2pcast verify --live``: compare the weights in engines' own memory with the version that the engines report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console
from p2pcast.daemon.daemon_requests import ask, bearer_token, daemon_url
from p2pcast.ground.errors import IntegrityError, RetryableError, UnverifiedError
from p2pcast.trust import bearer_tokens

AUDIT_S = 1860.0
"""Deadline of one request in seconds: a little longer than a peer's own limit for an audit."""
_SHOWN = 10


def verify_live(
    hub: str | None, state: Path | None, peer: str | None, engine: str | None, bearer_file: Path | None, as_json: bool
) -> None:
    """Audit the engines of the peer at ``peer`` or with the ``state`` folder, or else of every peer in the run. Given a
    hub, also compare with its digests. Prints the result. Raises IntegrityError if any weights differ,
    UnverifiedError if some could not be compared, and RetryableError if a peer is unreachable.
    """
    known: dict[str, Any] = {}
    if peer is None and state is None:
        url = daemon_url(hub, None)
        # Every peer's bearer token is derived from the hub's.
        hub_token = bearer_token(url, None, bearer_file)
        status = ask(url, "/status", token=hub_token)
        known = status.get("digests") or {}
        audited = [_ask_listed(p, engine, hub_token) for p in status.get("peers", []) if _has(p, engine)]
    else:
        if hub is not None:
            known = ask(daemon_url(hub, None), "/status").get("digests") or {}
        audited = [
            ask(
                daemon_url(peer, state),
                "/verify",
                {"engine": engine},
                timeout_s=AUDIT_S,
                state=state,
                bearer_file=bearer_file,
            )
        ]
    rows = [{"peer": a["name"], **row, "faults": _faults(row, known)} for a in audited for row in a["engines"]]
    if not rows:
        raise RetryableError(f"no peer has an engine {engine!r}" if engine else "no peer has joined")
    if as_json:
        click.echo(json.dumps({"ok": not any(r["faults"] or r["unknown"] for r in rows), "engines": rows}))
    else:
        console().print(_table(rows))
    if wrong := [f"{r['name']} at {r['peer']}: {fault}" for r in rows for fault in r["faults"]]:
        raise IntegrityError("engines' weights differ from their version:\n  " + "\n  ".join(wrong))
    if unknown := [f"{r['name']} at {r['peer']}: {_named(r['unknown'])}" for r in rows if r["unknown"]]:
        raise UnverifiedError(
            "engines' weights are not verified: these tensors cannot be compared in the engine's memory, and no "
            "difference was found in the others:\n  " + "\n  ".join(unknown)
        )


def _has(listed: dict[str, Any], engine: str | None) -> bool:
    return engine is None or any(e["name"] == engine for e in listed.get("engines") or [])


def _ask_listed(listed: dict[str, Any], engine: str | None, hub_token: str | None) -> dict[str, Any]:
    """Audit a peer at the HTTP address that the hub lists. Raises RetryableError if a different daemon answers: a
    loopback address listed by the hub belongs to the peer's machine, not to this one.
    """
    name, where = listed["name"], listed.get("http")
    if where is None:
        raise RetryableError(f"the HTTP address of peer {name} is unknown; give it with --peer URL")
    token = None if hub_token is None else bearer_tokens.of_node(hub_token, bytes.fromhex(listed["node"]))
    status = ask(f"http://{where}", "/status", token=token)
    if status.get("node") != listed["node"]:
        raise RetryableError(
            f"another daemon than peer {name} answers at {where}; run this command on the host of {name}, with "
            "--state DIR"
        )
    return ask(f"http://{where}", "/verify", {"engine": engine}, timeout_s=AUDIT_S, token=token)


def _faults(row: dict[str, Any], known: dict[str, Any]) -> list[str]:
    faults = [f"tensor {name!r} differs from version {row['version']}" for name in row["wrong"][:_SHOWN]]
    if len(row["wrong"]) > _SHOWN:
        faults.append(f"… and {len(row['wrong']) - _SHOWN} more tensors")
    if known and known.get(row["version"], row["state"]) != row["state"]:
        faults.append(
            f"version {row['version']} has state {row['state']} at the peer, {known[row['version']]} at the hub"
        )
    return faults


def _named(tensors: list[str]) -> str:
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return ", ".join(tensors[:_SHOWN]) + more


def _table(rows: list[dict[str, Any]]) -> Table:
    out = Table("engine", "at", "version", "state", "weights")
    for row in rows:
        found = [f"{len(row['wrong'])} tensors differ"] if row["wrong"] else []
        if row["unknown"]:
            found.append(f"not verified: {len(row['unknown'])} unreadable tensors, the first {row['unknown'][0]}")
        verdict = "; ".join(found) or "verified"
        if lacks := row.get("lacks"):  # a peer of an earlier release does not say
            verdict += f"; the engine takes no adapters, and lacks {', '.join(lacks)}"
        out.add_row(row["name"], row["peer"], row["version"], row["state"], verdict)
    return out
