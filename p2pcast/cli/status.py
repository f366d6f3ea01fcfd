"""``p2pcast status`` and ``p2pcast commit``: requests to a daemon's HTTP server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pcast.cli.ledger_table import ledger_heading, rollouts_line, workers_table
from p2pcast.cli.options import BEARER_FILE, PATH, VersionType, console
from p2pcast.cli.status_document import StatusObject, failure_lines
from p2pcast.daemon.daemon_requests import DEFAULT_URL, TIMEOUT_S, ask, daemon_url
from p2pcast.ground.plain_text import shown_text
from p2pcast.ground.version import Version
from p2pcast.state.clean_command import shadow_lines

WATCH_S = 0.5
MAX_NAMED = 5
STYLES = {"good": "green", "moving": "blue", "watch": "yellow", "alarm": "bold red", "gone": "dim"}
"""By level of a verdict."""


def table(document: object) -> Group:
    """Format a /status document for people. Accepts any document: names and errors come from other machines, and the
    daemon may run a different release.
    """
    found = StatusObject(document)
    if found.text("role") == "ledger":
        return Group(ledger_heading(found), workers_table(found))
    if found.text("role") == "peer":
        return Group(_peer_heading(found), _verdict(found), _engines([found]))
    return Group(_hub_heading(found), _verdict(found), _peers(found), _engines(found.rows("peers")))


def _verdict(daemon: StatusObject) -> Text:
    """Return the daemon's own verdict and, for a hub, its alarms with their remedies."""
    verdict = daemon.part("verdict")
    out = Text(verdict.text("words"), _style(verdict))
    for alarm in verdict.rows("alarms"):
        out.append(f"\n{alarm.text('text')} {alarm.text('do')}", _style(alarm))
    return out


def _style(verdict: StatusObject) -> str:
    return STYLES.get(verdict.text("level"), "")


def _hub_heading(hub: StatusObject) -> Text:
    last, uplink, barrier, mirror = (hub.part(key) for key in ("last", "uplink", "barrier", "mirror"))
    line = f"run {hub.text('run')[:12]}  version {hub.text('version', 'None')}  chains {len(hub.row('chains'))}"
    if uplink:
        line += f"  uplink {uplink.number('bps') / 1e6:.0f} Mbit/s ({uplink.text('from')})"
    if last:
        ratio = last.number("dense_bytes") / max(1.0, last.number("bytes"))
        line += f"\n{last.text('kind')} {last.text('version')}: {last.number('bytes') / 1e3:.1f} kB"
        line += f", {ratio:.0f} x smaller than dense"
        line += f", {100 * last.number('changed') / max(1.0, last.number('params')):.2f} % changed"
        if last.has("time_to_last_s"):
            line += f", {last.number('time_to_last_s'):.2f} s to the last peer"
    if barrier:
        line += _barrier(barrier)
    if mirror:
        line += f"\nmirror {mirror.text('url')}: leads to {mirror.text('version', 'nothing yet')}"
        if mirror.number("pending_bytes"):
            line += f", {mirror.text('lag_versions')} versions behind"
            line += f", {mirror.number('pending_bytes') / 1e6:.1f} MB to upload"
        line += _trouble(mirror)
    if rollouts := hub.part("rollouts"):
        line += rollouts_line(rollouts)
    for folder, why in hub.part("skipped").items():
        line += f"\nskipped {folder}: {why}"
    return Text(line + failure_lines(hub))


def _barrier(barrier: StatusObject) -> str:
    """Return at most two lines: the barrier's current round, and the outcome of the last one."""
    line, last = "", barrier.part("last")
    if barrier.has("version"):
        line += f"\nbarrier {barrier.text('version')} {barrier.text('phase')}: "
        line += f"{barrier.text('staged')} of {barrier.text('ready')} peers have staged the version, "
        line += f"{barrier.text('needed')} are needed"
        if barrier.number("deadline_s"):
            line += f", {barrier.number('deadline_s'):.0f} s left"
        if late := [shown_text(name) for name in barrier.row("waiting_for")]:
            line += f"; waiting for {', '.join(late[:MAX_NAMED])}" + (" and others" if len(late) > MAX_NAMED else "")
    if last:
        line += f"\nbarrier {last.text('version')}: {last.text('outcome')}"
        if last.has("ready"):
            line += f", {last.text('staged')} of {last.text('ready')} peers had staged the version"
    return line


def _peer_heading(peer: StatusObject) -> Text:
    hub, mirror = peer.part("hub"), peer.part("mirror")
    line = f"{peer.text('name')}  run {peer.text('run')[:12]}  "
    if hub:
        line += f"hub {hub.text('address')}{'' if hub.text('connected') == 'True' else ' (out of reach)'}  "
    line += f"staged {peer.text('staged', 'None')}"
    if mirror:
        use = f"leads to {mirror.text('version', 'nothing yet')}" if mirror.text("in_use") == "True" else "not needed"
        line += (
            f"\nmirror {mirror.text('url')}: {use}, {mirror.number('bytes_received') / 1e6:.2f} MB received"
            + _trouble(mirror)
        )
    return Text(line + failure_lines(peer))


def _trouble(mirror: StatusObject) -> str:
    return f"; {mirror.text('error')}" if mirror.text("error") else ""


def _peers(hub: StatusObject) -> Table:
    out = Table("peer", "verdict", "parent", "staged", "committed", "received", "duplicate", "score", "progress")
    for peer in hub.rows("peers"):
        progress = peer.part("progress")
        cells: list[str | Text] = [
            peer.text("name"),
            _words(peer),
            peer.text("parent") + _link_notes(peer),
            peer.text("staged", "-"),
            peer.text("committed", "-"),
            f"{peer.number('bytes_received') / 1e6:.2f} MB",
            peer.text("bytes_duplicate", "0"),
            f"{peer.number('score'):.1f}" if peer.has("score") else "-",
            f"{progress.text('version')} {progress.text('pieces')}/{progress.text('of')}"
            if progress
            else peer.text("state"),
        ]
        out.add_row(*map(_cell, cells))
    for peer in hub.rows("gone"):
        cells = [peer.text("name"), _words(peer), "-", peer.text("staged", "-"), peer.text("committed", "-")]
        out.add_row(*map(_cell, cells))
    return out


def _words(row: StatusObject) -> Text:
    verdict = row.part("verdict")
    return Text(verdict.text("words", row.text("error")), _style(verdict))


def _cell(text: str | Text) -> Text:
    return Text(text) if isinstance(text, str) else text


def _link_notes(peer: StatusObject) -> str:
    """Return anything unusual about a peer's link to its parent, in brackets."""
    notes = ["detached"] if peer.text("detached") == "True" else []
    notes += ["dialled by the parent"] if peer.part("link").text("dialled_by") == "parent" else []
    notes += ["unreachable"] if peer.text("reachable") == "False" else []
    return f" ({', '.join(notes)})" if notes else ""


def _engines(peers: list[StatusObject]) -> Table:
    out = Table("engine", "at", "ready", "staged", "version", "pause", "recomputed", "verdict")
    for peer in peers:
        for engine in peer.rows("engines"):
            lacks = engine.part("detail").text("lacks")
            cells: list[str | Text] = [
                engine.text("name"),
                peer.text("name"),
                "yes" if engine.text("ready") == "True" else "no",
                engine.text("staged", "-"),
                engine.text("committed", "-") + (f" without {lacks}" if lacks else ""),
                f"{1e3 * engine.number('pause_s'):.1f} ms" if engine.has("pause_s") else "-",
                f"{engine.text('recomputed_tokens')} tokens" if engine.has("recomputed_tokens") else "-",
                _words(engine),
            ]
            out.add_row(*map(_cell, cells))
    return out


@click.command()
@click.option("--hub", "url", metavar="URL", help=f"HTTP address of the daemon, hub or peer.  [default: {DEFAULT_URL}]")
@click.option("--state", type=PATH, help="State folder of a daemon on this machine, instead of --hub.")
@BEARER_FILE
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
@click.option("--watch", is_flag=True, help=f"Continuous display, refreshed every {WATCH_S:g} seconds.")
def status(url: str | None, state: Path | None, bearer_file: Path | None, as_json: bool, watch: bool) -> None:
    """Show the run, from its hub, or one peer, from that peer. The last lines name this user's shadows on this machine,
    used or not (`p2pcast clean`).

    \b
    Examples:
      p2pcast status
      p2pcast status --hub http://hub.example:7078 --bearer-file http.token
      p2pcast status --state ~/.local/state/p2pcast/peer-gpu7 --watch
    """
    where = daemon_url(url, state)
    if not watch:
        try:
            document = ask(where, "/status", state=state, bearer_file=bearer_file)
            if as_json:
                click.echo(json.dumps(document))
            else:
                console().print(table(document))
        finally:
            if not as_json:
                _print_shadows()
        return
    if as_json:
        while True:
            click.echo(json.dumps(ask(where, "/status", state=state, bearer_file=bearer_file)))
            time.sleep(WATCH_S)
    with Live(
        table(ask(where, "/status", state=state, bearer_file=bearer_file)), console=console(), auto_refresh=False
    ) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(table(ask(where, "/status", state=state, bearer_file=bearer_file)), refresh=True)


def _print_shadows() -> None:
    for line in shadow_lines():
        click.echo(line)


@click.command()
@click.argument("version", type=VersionType(("newest",)))
@click.option("--hub", "url", metavar="URL", help=f"HTTP address of the daemon, hub or peer.  [default: {DEFAULT_URL}]")
@click.option("--state", type=PATH, help="State folder of a daemon on this machine, instead of --hub.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.0, 3600.0),
    default=60.0,
    metavar="SECONDS",
    help="Longest wait in seconds for a peer's engines to be live.",
)
@BEARER_FILE
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of a line.")
def commit(
    version: Version | str,
    url: str | None,
    state: Path | None,
    timeout_s: float,
    bearer_file: Path | None,
    as_json: bool,
) -> None:
    """Let engines switch to VERSION, written BRANCH.STEP.

    A hub with --commit manual lets all engines of the run switch. A peer with --driver external switches its own
    engines to the staged version, which "newest" names too, and answers when they are live.

    \b
    Examples:
      p2pcast commit 0.12
      p2pcast commit newest --state ~/.local/state/p2pcast/peer-gpu7 --timeout 300
    """
    body = {"version": str(version), "timeout_s": timeout_s}
    answer = ask(
        daemon_url(url, state), "/commit", body, timeout_s=timeout_s + TIMEOUT_S, state=state, bearer_file=bearer_file
    )
    if as_json:
        click.echo(json.dumps(answer))
    elif "target" in answer:
        click.echo(f"engines may switch to {answer['target']}")
    else:
        pause = "" if answer["pause_s"] is None else f", longest pause {1e3 * answer['pause_s']:.1f} ms"
        click.echo(f"version {answer['version']} is live on {len(answer['engines'])} engines{pause}")
