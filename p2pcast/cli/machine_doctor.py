"""``p2pcast doctor``: which roles this machine can take on, and the command line that fixes each problem."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from p2pcast.cli.options import PATH, Address, documented, read_token, seconds, written
from p2pcast.doctor.machine_facts import OUTCOMES, ROLES, MachineFinding, Role
from p2pcast.doctor.machine_verdicts import could_run, judge
from p2pcast.ground.errors import LocalError, RetryableError, UsageError
from p2pcast.ground.plain_text import shown_text

if TYPE_CHECKING:
    from p2pcast.doctor.machine_measurements import WantedPort

COLOURS = {"ok": "green", "warn": "yellow", "unfit": "red", "unknown": "cyan"}
DAEMONS: tuple[Role, ...] = ("hub", "peer", "ledger")
ENGINE_PORT = 8000
"""vLLM's default, which the guides use."""
GB = 1e9


@click.command()
@click.option(
    "--role",
    "roles",
    type=click.Choice(ROLES),
    multiple=True,
    help="Role to examine this machine for; repeatable.  [default: every role whose packages are installed]",
)
@click.option("--size", type=click.FloatRange(0.0, min_open=True), metavar="GB", help="Size of the model in GB.")
@click.option("--state", type=PATH, help="Folder that the daemon would get as --state.  [default: the daemons' own]")
@click.option("--shadow", type=PATH, help="Folder that the daemon would get as --shadow.  [default: /dev/shm]")
@click.option(
    "--listen",
    type=Address(""),
    multiple=True,
    help="Further address that a daemon shall listen on, such as a peer's; repeatable.",
)
@click.option("--hub", type=Address(None, 7077), help="Address of a hub to reach from here, without joining.")
@click.option("--hub-http", metavar="URL", help="URL of the hub's HTTP server, for a comparison of clocks.")
@click.option(
    "--token-file", type=PATH, help="File with a join token, compared with the hub on this machine and never sent."
)
@click.option("--plaintext", is_flag=True, help="Links without TLS, as the hub at --hub was started.")
@click.option(
    "--to", type=Address(), help="Address of a machine that runs `p2pcast doctor --answer`, to measure the path."
)
@click.option(
    "--answer",
    "answering",
    type=Address(""),
    help="Address on which to answer another machine's --to once; this machine is not examined then.",
)
@seconds(
    "doctor",
    "answer-time",
    click.FloatRange(1.0, 3600.0),
    300.0,
    "Longest time in seconds for which --answer waits and answers.",
)
@documented
def doctor(
    roles: tuple[Role, ...],
    size: float | None,
    state: Path | None,
    shadow: Path | None,
    listen: tuple[tuple[str, int], ...],
    hub: tuple[str, int] | None,
    hub_http: str | None,
    token_file: Path | None,
    plaintext: bool,
    to: tuple[str, int] | None,
    answering: tuple[str, int] | None,
    answer_time_s: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Say what this machine is fit and unfit for, with the command line that corrects each fault.

    Nothing is changed, apart from a file of 32 MiB in the state folder or its nearest parent, which is removed again.

    Exit code 1: unfit for one of the roles. A warning or an unknown figure makes no machine unfit.

    \b
    A hub tells no stranger how fast its links are. To measure a path, run --answer on one machine, and --to on the
    other. Run --to on the hub's machine to see whether this machine can be reached from there.

    \b
    Examples:
      p2pcast doctor --size 16
      p2pcast doctor --role peer --role engine --size 16 --hub hub.example:7077 --token-file token
      p2pcast doctor --answer :7079
      p2pcast doctor --to gpu1.example:7079
    """
    from p2pcast.doctor.hub_measurements import measure_hub
    from p2pcast.doctor.machine_measurements import measure
    from p2pcast.doctor.path_measurements import measure_path
    from p2pcast.doctor.remote_verdicts import judge_hub, judge_path
    from p2pcast.process.daemon_process import TMPFS, state_home
    from p2pcast.trust.join_token import JoinToken

    if answering is not None:
        _answer(answering, answer_time_s)
        return
    if hub is None and (token_file is not None or plaintext or hub_http is not None):
        raise UsageError("--token-file, --plaintext and --hub-http need --hub HOST:PORT")
    if hub_http is not None and not hub_http.startswith(("http://", "https://")):
        raise UsageError(f"{hub_http!r} is not the URL of an HTTP server: write http://HOST:PORT")
    token = None if token_file is None else JoinToken.parse(read_token(token_file))
    machine = measure(state or state_home(), _ports(roles or ROLES, listen), shadow or TMPFS)
    chosen = list(dict.fromkeys(roles)) or could_run(machine.packages)
    findings = judge(machine, chosen, None if size is None else int(size * GB))
    reached = None
    if hub is not None:
        reached = measure_hub(hub, token, hub_http, plaintext=plaintext)
        known = to is not None and to[0] == hub[0]
        findings += judge_hub(reached, chosen, machine.window_bytes, throughput_known=known)
    path = None
    if to is not None:
        path = measure_path(to)
        findings += judge_path(path, chosen)
    measured = {
        "machine": asdict(machine),
        "hub": None if reached is None else asdict(reached),
        "path": None if path is None else asdict(path),
    }
    document = _document(findings, chosen, measured)
    if not written(document, output, as_json=as_json):
        _print(findings, chosen)
    if not document["fit"]:
        unfit = [role for role in chosen if _of(findings, role, "unfit")]
        raise LocalError(
            f"this machine is unfit for {', '.join(unfit)}: each line after $ corrects or examines one fault"
        )


def _answer(listen: tuple[str, int], time_s: float) -> None:
    """Answer another machine's doctor. Raises LocalError, and RetryableError if none connects within ``time_s``."""
    from p2pcast.doctor.path_measurements import CONNECTIONS, answer

    def opened(address: str) -> None:
        port = address.rpartition(":")[2]
        click.echo(f"answering at {address} for {time_s:.0f} s; on the other machine: p2pcast doctor --to HERE:{port}")

    if (served := answer(listen, time_s, opened)) < CONNECTIONS:
        raise RetryableError(f"{served} of {CONNECTIONS} measurements came within {time_s:.0f} s")
    click.echo("measured; the other machine has the figures")


def _ports(roles: Sequence[Role], more: Sequence[tuple[str, int]]) -> list[WantedPort]:
    """Return the default ports of the commands for ``roles``, followed by ``more``."""
    wanted: list[WantedPort] = []
    if "hub" in roles:
        wanted += [(("hub",), f"--{name}", *_default("seed", name)) for name in ("listen", "http")]
    if "ledger" in roles:
        wanted.append((("ledger",), "--http", *_default("ledger", "http")))
    if "engine" in roles:
        wanted.append((("engine",), "--port", "127.0.0.1", ENGINE_PORT))
    return [*wanted, *((DAEMONS, "--listen", *each) for each in more)]


def _default(command: str, name: str) -> tuple[str, int]:
    """Return the default address of a command's option."""
    from p2pcast.cli import cli

    found = cli.get_command(click.get_current_context(), command)
    assert found is not None
    (option,) = (each for each in found.params if each.name == name)
    return cast(tuple[str, int], option.type.convert(option.default, option, None))


def _of(findings: Sequence[MachineFinding], role: Role, outcome: str) -> list[str]:
    """Return the checks with this outcome for ``role``, each listed once."""
    return list(dict.fromkeys(f.check for f in findings if role in f.roles and f.outcome == outcome))


def _document(findings: Sequence[MachineFinding], roles: Sequence[Role], measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "fit": not any(each.outcome == "unfit" for each in findings),
        "host": socket.gethostname(),
        "roles": {role: {outcome: _of(findings, role, outcome) for outcome in OUTCOMES} for role in roles},
        "not_examined": [role for role in ROLES if role not in roles],
        "findings": [asdict(each) for each in findings],
        "measured": measured,
    }


def _print(findings: Sequence[MachineFinding], roles: Sequence[Role]) -> None:
    """Print a line for each finding and one for its remedy. Lines are not wrapped, so a remedy can be copied."""
    for each in findings:
        said = "" if len(each.roles) == len(roles) else f"  [{', '.join(each.roles)}]"
        outcome = click.style(f"{each.outcome:8}", fg=COLOURS[each.outcome])
        click.echo(f"{outcome}{each.check:14}{shown_text(each.text)}{said}")
        if each.remedy:
            click.echo(f"{'':22}$ {shown_text(each.remedy)}")
    click.echo()
    for role in ROLES:
        if role not in roles:
            click.echo(f"{role:8}not examined: give --role {role}")
        elif unfit := _of(findings, role, "unfit"):
            click.echo(f"{role:8}{click.style('unfit', fg='red')}: {', '.join(unfit)}")
        else:
            more = [(_of(findings, role, outcome), outcome) for outcome in ("warn", "unknown")]
            notes = "; ".join(f"{outcome}: {', '.join(checks)}" for checks, outcome in more if checks)
            click.echo(f"{role:8}{click.style('fit', fg='green')}{'; ' + notes if notes else ''}")
