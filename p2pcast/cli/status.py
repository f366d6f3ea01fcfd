"""``p2pcast status`` and ``p2pcast commit``: talk to a daemon over its HTTP side."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
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
from rich.text import Text

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
MAX_SHOWN = 300
"""Characters of one value."""


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
                    f"{url}: a process of user {other} answers there, not the daemon of {folder}; no token was sent"
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
            document = json.load(response)
    except urllib.error.HTTPError as error:
        try:
            why = json.load(error)["error"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
            why = error.reason
        kinds = {400: UsageError, 401: RefusedError, 409: RefusedError, 504: RetryableError}
        raise kinds.get(error.code, LocalError)(f"{url}: {shown_text(why)}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RetryableError(
            f"cannot reach the daemon at {url}: {shown_text(getattr(reason, 'strerror', None) or reason)}"
        ) from None
    if not isinstance(document, dict):
        raise LocalError(f"{url} answers, but not as a p2pcast daemon does")
    return document


def table(document: object) -> Group:
    """A /status document as text for people, whatever the document holds: names and errors come from other machines, and the daemon may be of another release."""
    found = _Found(document)
    if found.text("role") == "peer":
        return Group(_peer_heading(found), _engines([found]))
    return Group(_hub_heading(found), _peers(found), _engines(found.rows("peers")))


class _Found:
    """A map from a document; what is not there, or of another kind, is empty."""

    def __init__(self, document: object) -> None:
        self._map = document if isinstance(document, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._map)

    def has(self, key: str) -> bool:
        return self._map.get(key) is not None

    def text(self, key: str, otherwise: str = "") -> str:
        return shown_text(self._map[key]) if self.has(key) else otherwise

    def number(self, key: str) -> float:
        value = self._map.get(key)
        try:
            return float(value) if isinstance(value, int | float) else 0.0
        except OverflowError:
            return math.inf

    def part(self, key: str) -> _Found:
        return _Found(self._map.get(key))

    def row(self, key: str) -> list[object]:
        value = self._map.get(key)
        return value if isinstance(value, list) else []

    def rows(self, key: str) -> list[_Found]:
        return [_Found(each) for each in self.row(key)]

    def items(self) -> list[tuple[str, str]]:
        return [(shown_text(key), shown_text(value)) for key, value in self._map.items()]


def shown_text(value: object) -> str:
    """On one line, without what moves a terminal's cursor or changes its colours."""
    try:
        said = str(value)
    except (ValueError, RecursionError):
        said = "?"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in said[:MAX_SHOWN])


def _hub_heading(hub: _Found) -> Text:
    last, uplink, barrier, mirror = (hub.part(key) for key in ("last", "uplink", "barrier", "mirror"))
    line = f"run {hub.text('run')[:12]}  version {hub.text('version', 'None')}  chains {len(hub.row('chains'))}"
    if uplink:
        line += f"  uplink {uplink.number('bps') / 1e6:.0f} Mbit/s ({uplink.text('from')})"
    if last:
        ratio = last.number("dense_bytes") / max(1.0, last.number("bytes"))
        line += (
            f"\n{last.text('kind')} {last.text('version')}: {last.number('bytes') / 1e3:.1f} kB, {ratio:.0f} x smaller than dense"
        )
        line += f", {100 * last.number('changed') / max(1.0, last.number('params')):.2f} % changed"
        if last.has("time_to_last_s"):
            line += f", {last.number('time_to_last_s'):.2f} s to the last peer"
    if barrier:
        line += _barrier(barrier)
    if mirror:
        line += f"\nmirror {mirror.text('url')}: leads to {mirror.text('version', 'nothing yet')}"
        if mirror.number("pending_bytes"):
            line += f", {mirror.text('lag_versions')} versions behind, {mirror.number('pending_bytes') / 1e6:.1f} MB to upload"
        line += _trouble(mirror)
    for folder, why in hub.part("skipped").items():
        line += f"\nskipped {folder}: {why}"
    return Text(line + _failures(hub))


def _failures(daemon: _Found) -> str:
    rows = (f"task {failure.text('task')!r} failed: {failure.text('why')}" for failure in daemon.rows("failures"))
    return "".join(f"\nunhealthy, to be restarted: {row}" for row in rows)


def _barrier(barrier: _Found) -> str:
    """Two lines at most: the round that is on, and how the last one ended."""
    line, last = "", barrier.part("last")
    if barrier.has("version"):
        line += f"\nbarrier {barrier.text('version')} {barrier.text('phase')}: "
        line += f"{barrier.text('staged')} of {barrier.text('ready')} peers have staged it, {barrier.text('needed')} are needed"
        if barrier.number("deadline_s"):
            line += f", {barrier.number('deadline_s'):.0f} s left"
        if late := [shown_text(name) for name in barrier.row("waiting_for")]:
            line += f"; waiting for {', '.join(late[:MAX_NAMED])}" + (" and others" if len(late) > MAX_NAMED else "")
    if last:
        line += f"\nbarrier {last.text('version')}: {last.text('outcome')}"
        if last.has("ready"):
            line += f", {last.text('staged')} of {last.text('ready')} peers had staged it"
    return line


def _peer_heading(peer: _Found) -> Text:
    hub, mirror = peer.part("hub"), peer.part("mirror")
    line = f"{peer.text('name')}  run {peer.text('run')[:12]}  "
    if hub:
        line += f"hub {hub.text('address')}{'' if hub.text('connected') == 'True' else ' (out of reach)'}  "
    line += f"staged {peer.text('staged', 'None')}"
    if mirror:
        use = f"leads to {mirror.text('version', 'nothing yet')}" if mirror.text("in_use") == "True" else "not needed"
        line += f"\nmirror {mirror.text('url')}: {use}, {mirror.number('bytes_received') / 1e6:.2f} MB received" + _trouble(
            mirror
        )
    return Text(line + _failures(peer))


def _trouble(mirror: _Found) -> str:
    return f"; {mirror.text('error')}" if mirror.text("error") else ""


def _peers(hub: _Found) -> Table:
    out = Table("peer", "parent", "state", "staged", "committed", "received", "duplicate", "score", "progress")
    for peer in hub.rows("peers"):
        progress = peer.part("progress")
        cells = [
            peer.text("name"),
            peer.text("parent") + _asides(peer),
            peer.text("state"),
            peer.text("staged", "-"),
            peer.text("committed", "-"),
            f"{peer.number('bytes_received') / 1e6:.2f} MB",
            peer.text("bytes_duplicate", "0"),
            f"{peer.number('score'):.1f}" if peer.has("score") else "-",
            f"{progress.text('version')} {progress.text('pieces')}/{progress.text('of')}" if progress else "",
        ]
        out.add_row(*map(Text, cells))
    return out


def _asides(peer: _Found) -> str:
    """What is out of the ordinary about a peer's place."""
    said = ["detached"] if peer.text("detached") == "True" else []
    said += ["dialled it"] if peer.part("link").text("dialled_by") == "parent" else []
    said += ["nobody gets in"] if peer.text("reachable") == "False" else []
    return f" ({', '.join(said)})" if said else ""


def _engines(peers: list[_Found]) -> Table:
    out = Table("engine", "at", "ready", "staged", "version", "pause", "recomputed", "trouble")
    for peer in peers:
        for engine in peer.rows("engines"):
            cells = [
                engine.text("name"),
                peer.text("name"),
                "yes" if engine.text("ready") == "True" else "no",
                engine.text("staged", "-"),
                engine.text("committed", "-"),
                f"{1e3 * engine.number('pause_s'):.1f} ms" if engine.has("pause_s") else "-",
                f"{engine.text('recomputed_tokens')} tokens" if engine.has("recomputed_tokens") else "-",
                engine.text("error")[:80],
            ]
            out.add_row(*map(Text, cells))
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
