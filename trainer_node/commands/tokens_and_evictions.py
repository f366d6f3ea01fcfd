"""``p2pcast token`` and ``p2pcast evict``: admit nodes to a run, and exclude them. Both commands ask the hub."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import BEARER_FILE, PATH, console
from p2pcast.daemon.daemon_requests import DEFAULT_URL, ask, daemon_url
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.errors import UsageError
from p2pcast.trust.dial_permissions import BOUGHT

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FOREVER = "never"

HUB = click.option("--hub", "url", metavar="URL", help=f"HTTP address of the hub.  [default: {DEFAULT_URL}]")
STATE = click.option("--state", type=PATH, help="State folder of a hub on this machine, instead of --hub.")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of text.")


def span_s(text: str) -> float | None:
    """Convert ``90m``, ``12h`` or ``7d`` to seconds; None for ``never``. Raises UsageError."""
    if text == FOREVER:
        return None
    match = _SPAN.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is no span of time: write a number and a unit, as in 90m, 12h or 7d, or {FOREVER}")
    return float(match[1]) * _SECONDS[match[2]]


@click.group()
def token() -> None:
    """Create, list and revoke join tokens. Revoking a token excludes no node that has already joined: see `p2pcast
    evict`.

    \b
    Examples:
      p2pcast token create --ttl 12h -o token
      p2pcast token create --ttl never --uses 16 --state ~/.local/state/p2pcast/hub
      p2pcast token revoke 3fa9c2
    """


@token.command()
@click.option("--role", type=click.Choice(BOUGHT), default="peer", help="Role of the nodes that the token admits.")
@click.option(
    "--ttl",
    default="24h",
    metavar="SPAN",
    help="Lifetime of the token in minutes, hours or days: 90m, 12h, 7d; or never, with --uses.",
)
@click.option(
    "--uses",
    type=click.IntRange(1),
    help="Number of nodes that the token admits; required with --ttl never.  [default: no limit]",
)
@click.option("-o", "--output", type=PATH, help="File for the token, mode 0600, instead of stdout.")
@HUB
@STATE
@BEARER_FILE
@JSON
def create(
    role: str,
    ttl: str,
    uses: int | None,
    output: Path | None,
    url: str | None,
    state: Path | None,
    bearer_file: Path | None,
    as_json: bool,
) -> None:
    """Create a token that admits new nodes in one role, for a limited time, up to a limited number. Works only on the
    hub's own machine.

    A token's expiry limits first admissions alone: nodes that the token has admitted stay. For a fleet that scales
    automatically, use --ttl never --uses N, with N nodes in all.
    """
    if span_s(ttl) is None and uses is None:
        raise UsageError("--ttl never needs --uses N: a leaked token that never expires must admit few nodes")
    body = {"role": role, "ttl_s": span_s(ttl), "uses": uses}
    made = ask(daemon_url(url, state), "/token/create", body, state=state, bearer_file=bearer_file)
    if output is not None:
        atomic_write(output, f"{made.pop('token')}\n".encode(), 0o600)
    if as_json:
        click.echo(json.dumps(made))
    else:
        click.echo(made.get("token") or f"token {made['id']} is in {output}")


@token.command("list")
@HUB
@STATE
@BEARER_FILE
@JSON
def list_(url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool) -> None:
    """List all tokens that are in force or have admitted a node, without their secrets."""
    rows = ask(daemon_url(url, state), "/token/list", {}, state=state, bearer_file=bearer_file)["tokens"]
    if as_json:
        click.echo(json.dumps(rows))
        return
    out = Table("token", "admits as", "used", "expires", "state")
    for row in rows:
        used = f"{row['used']}" + ("" if row["uses"] is None else f" of {row['uses']}")
        out.add_row(
            row["id"],
            row["role"],
            used,
            _when(row["expires"]),
            row["fault"] or ("the hub's own" if row["own"] else "in force"),
        )
    console().print(out)


@token.command()
@click.argument("ident", metavar="TOKEN_ID")
@HUB
@STATE
@BEARER_FILE
@JSON
def revoke(ident: str, url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool) -> None:
    """Revoke a token: from now on the token admits no node. TOKEN_ID: an id from `p2pcast token list`, or an
    unambiguous beginning of one. The hub replaces its own token by a new one, in the same file.
    """
    done = ask(daemon_url(url, state), "/token/revoke", {"id": ident}, state=state, bearer_file=bearer_file)
    click.echo(json.dumps(done) if as_json else f"token {done['id']} is revoked" + _fresh(done))


@click.command()
@click.argument("peer")
@click.option("--undo", is_flag=True, help="End of an eviction: PEER may join again.")
@click.option("--keep-token", is_flag=True, help="Eviction without revoking tokens, for a PEER that holds none.")
@HUB
@STATE
@BEARER_FILE
@JSON
def evict(
    peer: str,
    undo: bool,
    keep_token: bool,
    url: str | None,
    state: Path | None,
    bearer_file: Path | None,
    as_json: bool,
) -> None:
    """Exclude PEER (a node's id, or a name) from the run, now and for good: hub and peers close their connections to
    it.

    The command revokes the tokens with which PEER could join again under another id. That is the token that admitted
    PEER. If that was the hub's own, all of the hub's own tokens are revoked. The token file then holds a new token.
    Every other node keeps its certificate and renews it as before.

    \b
    Examples:
      p2pcast evict gpu7
      p2pcast evict gpu7 --undo
    """
    done = ask(
        daemon_url(url, state),
        "/evict",
        {"peer": peer, "undo": undo, "keep_token": keep_token},
        state=state,
        bearer_file=bearer_file,
    )
    if as_json:
        click.echo(json.dumps(done))
        return
    click.echo(_evicted(done))


def _evicted(done: dict[str, Any]) -> str:
    if not done["evicted"]:
        return f"{done['node']} may join again"
    lines = [f"{done['peer']} ({done['node']}) is evicted"]
    if revoked := done.get("revoked_tokens"):
        many = len(revoked) > 1
        lines.append(
            f"token{'s' if many else ''} {', '.join(revoked)} {'are' if many else 'is'} revoked: "
            f"the node could have joined again under another id with {'them' if many else 'it'}. "
            "Other nodes that have joined stay in the run"
        )
        lines.append(
            _fresh(done).lstrip("\n") or "new nodes with a revoked token need another token: `p2pcast token create`"
        )
    if others := done.get("others"):
        lines.append(f"not evicted, and also started with --name {done['peer']}: {', '.join(others)}")
    return "\n".join([*lines, done["note"]] if done["note"] else lines)


def _fresh(done: dict[str, Any]) -> str:
    file = done.get("token_file")
    return "" if file is None else f"\na new token is in {file}: nodes that join from now on need this token"


def _when(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
