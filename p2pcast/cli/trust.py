"""``p2pcast token`` and ``p2pcast evict``: who may join a run, and who may not any more. Both ask the hub."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import BEARER_FILE, PATH, console
from p2pcast.cli.status import ask, daemon_url
from p2pcast.errors import UsageError
from p2pcast.store.files import atomic_write

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
FOREVER = "never"

HUB = click.option("--hub", "url", metavar="URL", help="The hub's HTTP address; on its own machine the default will do.")
STATE = click.option("--state", type=PATH, help="The hub's state folder, on its own machine.")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document.")


def span_s(text: str) -> float | None:
    """``90m``, ``12h``, ``7d`` in seconds; None for ``never``. Raises UsageError."""
    if text == FOREVER:
        return None
    match = _SPAN.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is no span of time: write 90m, 12h, 7d or {FOREVER}")
    return float(match[1]) * _SECONDS[match[2]]


@click.group()
def token() -> None:
    """Join tokens: make one for others, see what there is, revoke one. What a token has bought stays in force: see `p2pcast evict`."""


@token.command()
@click.option("--role", type=click.Choice(["peer", "trainer"]), default="peer", show_default=True, help="What it admits as.")
@click.option(
    "--ttl", default="24h", show_default=True, metavar="SPAN", help="Lifetime of the token: 90m, 12h, 7d; or never, with --uses."
)
@click.option(
    "--uses",
    type=click.IntRange(1),
    help="Number of nodes that the token admits.  [default: any number; needed with --ttl never]",
)
@click.option("-o", "--output", type=PATH, help="Write the token there (mode 0600) instead of stdout.")
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
    """Make a token that admits new nodes: for one role, a limited time, a limited number of nodes. Only on the hub's own machine.

    A token's expiry limits first admissions alone: nodes that the token has admitted stay. For a fleet that grows by itself: --ttl never --uses N, for N nodes in all.
    """
    if span_s(ttl) is None and uses is None:
        raise UsageError("--ttl never needs --uses N: a token that never expires may be found years from now")
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
    """All tokens that are in force or have admitted somebody; not their secrets."""
    rows = ask(daemon_url(url, state), "/token/list", {}, state=state, bearer_file=bearer_file)["tokens"]
    if as_json:
        click.echo(json.dumps(rows))
        return
    out = Table("token", "admits as", "used", "expires", "state")
    for row in rows:
        used = f"{row['used']}" + ("" if row["uses"] is None else f" of {row['uses']}")
        out.add_row(
            row["id"], row["role"], used, _when(row["expires"]), row["fault"] or ("the hub's own" if row["own"] else "in force")
        )
    console().print(out)


@token.command()
@click.argument("ident", metavar="TOKEN_ID")
@HUB
@STATE
@BEARER_FILE
@JSON
def revoke(ident: str, url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool) -> None:
    """From now on it admits nobody. TOKEN_ID: see `p2pcast token list`; enough of its beginning will do. In the place of the hub's own token comes a new one, in the same file."""
    done = ask(daemon_url(url, state), "/token/revoke", {"id": ident}, state=state, bearer_file=bearer_file)
    click.echo(json.dumps(done) if as_json else f"token {done['id']} is revoked" + _fresh(done))


@click.command()
@click.argument("peer")
@click.option("--undo", is_flag=True, help="Let it join again.")
@click.option("--keep-token", is_flag=True, help="Revoke no token; for when PEER cannot have one any more.")
@HUB
@STATE
@BEARER_FILE
@JSON
def evict(
    peer: str, undo: bool, keep_token: bool, url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool
) -> None:
    """Cut PEER (a node's id, or a name) off from hub and peers, now and for good.

    This revokes the tokens that would let PEER in again under another id: the token that admitted PEER, and if that was the hub's own, all of the hub's own. The token file then holds a fresh one.
    Every other node keeps its certificate and renews it as before.
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
        lines.append(
            f"token {', '.join(revoked)} {'is' if len(revoked) == 1 else 'are'} revoked: the node could have come back under another id with {'it' if len(revoked) == 1 else 'them'}. "
            "Nodes that have joined stay in the run"
        )
        lines.append(
            _fresh(done).lstrip("\n") or "nodes that were to join with a revoked token need another one: `p2pcast token create`"
        )
    if others := done.get("others"):
        lines.append(f"not evicted, and also started with --name {done['peer']}: {', '.join(others)}")
    return "\n".join([*lines, done["note"]] if done["note"] else lines)


def _fresh(done: dict[str, Any]) -> str:
    file = done.get("token_file")
    return "" if file is None else f"\na fresh token is in {file}: nodes that join from now on need this token"


def _when(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
