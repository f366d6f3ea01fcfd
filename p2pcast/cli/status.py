"""``p2pcast status`` and ``p2pcast commit``: talk to a daemon over its HTTP side."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table

from p2pcast.cli.listeners import foreign_listener
from p2pcast.cli.options import BEARER_FILE, PATH, VersionType, console
from p2pcast.daemon import state_home
from p2pcast.errors import LocalError, RefusedError, RetryableError, UsageError
from p2pcast.trust import bearer
from p2pcast.version import Version

DEFAULT_URL = "http://127.0.0.1:7078"
TIMEOUT_S = 10.0
WATCH_S = 0.5
MAX_NAMED = 5


def daemon_url(url: str | None, state: Path | None) -> str:
    """Where the daemon answers: as given, or as the daemon wrote into its state folder. Raises UsageError."""
    if url is not None and state is not None:
        raise UsageError("give --hub or --state, not both")
    if state is None:
        return (url or DEFAULT_URL).rstrip("/")
    try:
        return str(json.loads((state / "daemon.json").read_text())["http"])
    except (OSError, ValueError, KeyError):
        raise RetryableError(f"no daemon runs on the state folder {state}") from None


def bearer_token(url: str, state: Path | None = None, file: Path | None = None) -> str | None:
    """What opens a daemon's HTTP side: from ``file``, its state folder, the environment, or else the state folder in the usual place whose daemon answers at
    ``url``; never from argv. Raises LocalError; RefusedError where another user's process listens in place of the state folder's daemon."""
    if file is not None:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(f"cannot read the bearer file {file}: {getattr(error, 'strerror', None) or error}") from None
    given = os.environ.get(bearer.VARIABLE, "").strip() or None
    if state is None and given is not None:
        return given
    for folder in [state] if state is not None else _folders_of(url):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path = folder / bearer.FILE
            text, owner = path.read_text().strip(), path.stat().st_uid
            if (other := foreign_listener(url, owner)) is not None:
                if state is None:
                    continue  # a daemon.json of a daemon that was killed
                raise RefusedError(
                    f"{url}: a process of user {other} answers there, not the daemon of {folder}; it is told no token"
                )
            return text
    return given


def _folders_of(url: str) -> Iterator[Path]:
    """State folders in the usual place that say that their daemon answers at ``url``."""
    for path in sorted(state_home().glob("*/daemon.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(path.read_text())["http"] == url:
                yield path.parent


def ask(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    state: Path | None = None,
    token: str | None = None,
    bearer_file: Path | None = None,
) -> dict[str, Any]:
    """One request; with a bearer token, if there is one: ``token``, or as ``bearer_token`` finds it by ``state`` and ``bearer_file``. Raises RetryableError (unreachable, or not done in time), RefusedError, LocalError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not a URL: write http://HOST:PORT")
    headers = {"Content-Type": "application/json"}
    if found := token or bearer_token(url, state, bearer_file):
        headers["Authorization"] = f"Bearer {found}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            document: dict[str, Any] = json.load(response)
            return document
    except urllib.error.HTTPError as error:
        try:
            why = json.load(error)["error"]
        except (ValueError, KeyError, TypeError):
            why = error.reason
        kinds = {400: UsageError, 401: RefusedError, 409: RefusedError, 504: RetryableError}
        raise kinds.get(error.code, LocalError)(f"{url}: {why}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RetryableError(f"cannot reach the daemon at {url}: {getattr(reason, 'strerror', None) or reason}") from None


def table(document: dict[str, Any]) -> Group:
    """A /status document as a person reads it."""
    if document.get("role") == "peer":
        return Group(_peer_heading(document), _engines([document]))
    return Group(_hub_heading(document), _peers(document), _engines(document.get("peers", [])))


def _hub_heading(document: dict[str, Any]) -> str:
    last = document.get("last") or {}
    line = f"run {document['run'][:12]}  version {document['version']}  chains {len(document.get('chains', []))}"
    if (uplink := document.get("uplink")) is not None:
        line += f"  uplink {uplink['bps'] / 1e6:.0f} Mbit/s ({uplink['from']})"
    if last:
        ratio = last["dense_bytes"] / max(1, last["bytes"])
        line += f"\n{last['kind']} {last['version']}: {last['bytes'] / 1e3:.1f} kB, {ratio:.0f} x smaller than dense"
        line += f", {100 * last['changed'] / max(1, last['params']):.2f} % changed"
        if last.get("time_to_last_s") is not None:
            line += f", {last['time_to_last_s']:.2f} s to the last peer"
    if (barrier := document.get("barrier")) is not None:
        line += _barrier(barrier)
    if (mirror := document.get("mirror")) is not None:
        line += f"\nmirror {mirror['url']}: leads to {mirror['version'] or 'nothing yet'}"
        if mirror["pending_bytes"]:
            line += f", {mirror['lag_versions']} versions behind, {mirror['pending_bytes'] / 1e6:.1f} MB to upload"
        line += _trouble(mirror)
    for folder, why in document.get("skipped", {}).items():
        line += f"\nskipped {folder}: {why}"
    return line + _failures(document)


def _failures(document: dict[str, Any]) -> str:
    rows = (f"task {failure['task']!r} failed: {failure['why']}" for failure in document.get("failures", []))
    return "".join(f"\nunhealthy, to be restarted: {row}" for row in rows)


def _barrier(barrier: dict[str, Any]) -> str:
    """Two lines at most: the round that is on, and how the last one ended."""
    line = ""
    if barrier["version"] is not None:
        line += (
            f"\nbarrier {barrier['version']} {barrier['phase']}: {barrier['staged']} of {barrier['ready']} peers have staged it"
        )
        line += f", {barrier['needed']} are needed" + (f", {barrier['deadline_s']:.0f} s left" if barrier["deadline_s"] else "")
        if late := barrier["waiting_for"]:
            line += f"; waiting for {', '.join(late[:MAX_NAMED])}" + (" and others" if len(late) > MAX_NAMED else "")
    if (last := barrier["last"]) is not None:
        line += f"\nbarrier {last['version']}: {last['outcome']}"
        if "ready" in last:
            line += f", {last['staged']} of {last['ready']} peers had staged it"
    return line


def _peer_heading(document: dict[str, Any]) -> str:
    hub, mirror = document["hub"], document.get("mirror")
    line = f"{document['name']}  run {document['run'][:12]}  "
    if hub is not None:
        line += f"hub {hub['address']}{'' if hub['connected'] else ' (out of reach)'}  "
    line += f"staged {document['staged']}"
    if mirror is not None:
        use = f"leads to {mirror['version'] or 'nothing yet'}" if mirror["in_use"] else "not needed"
        line += f"\nmirror {mirror['url']}: {use}, {mirror['bytes_received'] / 1e6:.2f} MB received" + _trouble(mirror)
    return line + _failures(document)


def _trouble(mirror: dict[str, Any]) -> str:
    return f"; {mirror['error']}" if mirror["error"] else ""


def _peers(document: dict[str, Any]) -> Table:
    out = Table("peer", "parent", "state", "staged", "committed", "received", "duplicate", "score", "progress")
    for peer in document.get("peers", []):
        progress = peer.get("progress")
        out.add_row(
            peer["name"],
            peer["parent"] + _asides(peer),
            str(peer.get("state") or ""),
            str(peer.get("staged") or "-"),
            str(peer.get("committed") or "-"),
            f"{(peer.get('bytes_received') or 0) / 1e6:.2f} MB",
            str(peer.get("bytes_duplicate") or 0),
            "-" if peer.get("score") is None else f"{peer['score']:.1f}",
            f"{progress['version']} {progress['pieces']}/{progress['of']}" if progress else "",
        )
    return out


def _asides(peer: dict[str, Any]) -> str:
    """What is out of the ordinary about a peer's place."""
    link = peer.get("link")
    said = ["detached"] if peer.get("detached") else []
    said += ["dialled it"] if isinstance(link, dict) and link.get("dialled_by") == "parent" else []
    said += ["nobody gets in"] if peer.get("reachable") is False else []
    return f" ({', '.join(said)})" if said else ""


def _engines(peers: list[dict[str, Any]]) -> Table:
    out = Table("engine", "at", "ready", "staged", "version", "pause", "recomputed", "trouble")
    for peer in peers:
        for engine in peer.get("engines") or []:
            pause = engine.get("pause_s")
            out.add_row(
                engine["name"],
                peer["name"],
                "yes" if engine["ready"] else "no",
                str(engine.get("staged") or "-"),
                str(engine.get("committed") or "-"),
                "-" if pause is None else f"{1e3 * pause:.1f} ms",
                "-" if engine.get("recomputed_tokens") is None else f"{engine['recomputed_tokens']} tokens",
                (engine.get("error") or "")[:80],
            )
    return out


@click.command()
@click.option("--hub", "url", metavar="URL", help=f"The daemon's HTTP address; {DEFAULT_URL} by default.")
@click.option("--state", type=PATH, help="State folder of a daemon on this machine.")
@BEARER_FILE
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--watch", is_flag=True, help="Go on showing it.")
def status(url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool, watch: bool) -> None:
    """Show the run as the hub sees it, or a peer as it sees itself."""
    where = daemon_url(url, state)
    if not watch:
        document = ask(where, "/status", state=state, bearer_file=bearer_file)
        if as_json:
            click.echo(json.dumps(document))
        else:
            console().print(table(document))
        return
    if as_json:
        while True:
            click.echo(json.dumps(ask(where, "/status", state=state, bearer_file=bearer_file)))
            time.sleep(WATCH_S)
    with Live(table(ask(where, "/status", state=state, bearer_file=bearer_file)), console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(table(ask(where, "/status", state=state, bearer_file=bearer_file)), refresh=True)


@click.command()
@click.argument("version", type=VersionType(("newest",)))
@click.option("--hub", "url", metavar="URL", help=f"The daemon's HTTP address; {DEFAULT_URL} by default.")
@click.option("--state", type=PATH, help="State folder of a daemon on this machine.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0, 3600.0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="A peer may take so long until its engines are live.",
)
@BEARER_FILE
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def commit(
    version: Version | str,
    url: str | None,
    state: Path | None,
    timeout_s: float,
    bearer_file: Path | None,
    as_json: bool,
) -> None:
    """Let engines switch to VERSION: a hub that runs with --commit manual tells all of them; a peer that runs with --driver external switches
    its own to the version that it has staged (or "newest"), and answers when they are live."""
    body = {"version": str(version), "timeout_s": timeout_s}
    answer = ask(daemon_url(url, state), "/commit", body, timeout_s=timeout_s + TIMEOUT_S, state=state, bearer_file=bearer_file)
    if as_json:
        click.echo(json.dumps(answer))
    elif "target" in answer:
        click.echo(f"engines may switch to {answer['target']}")
    else:
        pause = "" if answer["pause_s"] is None else f", longest pause {1e3 * answer['pause_s']:.1f} ms"
        click.echo(f"version {answer['version']} is live on {len(answer['engines'])} engines{pause}")
