"""``p2pcast lab``: run scenarios on emulated networks on this machine."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from p2pcast.cli.options import PATH, console, write_document
from p2pcast.ground.errors import EXIT_FAILED, LocalError, UsageError

DOCTOR = {
    "name": "doctor",
    "what": "network emulation that this machine supports: each kernel feature is tried; user-mode Linux is looked for",
}
"""The one entry of `p2pcast lab list` that is a command and no scenario."""
RESULT = "result.json"

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of a table.")


class Scenarios(click.Group):
    """A group in which every unknown command is a scenario's name, or the path of a scenario file."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or _command(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from netem.lab.scenario_run import known

        scenarios = [CompletionItem(name) for name in known() if name.startswith(incomplete)]
        return super().shell_complete(ctx, incomplete) + scenarios


@click.group(cls=Scenarios, subcommand_metavar="SCENARIO|list|doctor [OPTIONS]")
def lab() -> None:
    """Run SCENARIO on an emulated network on this machine. SCENARIO: a name from `p2pcast lab list`, or the path of a
    TOML file (docs/guides/wan-experiments.md).

    \b
    Examples:
      p2pcast lab doctor
      p2pcast lab list
      p2pcast lab echo2-chains --only 1 -o out
    """


@lab.command("list")
@JSON
def list_command(as_json: bool) -> None:
    """List the scenarios, their length in minutes, and whether this machine can run them."""
    from netem.emulation.doctor import backends, probe
    from netem.lab.scenario_run import backend_of, known, load

    every = backends(probe())
    listed: list[dict[str, Any]] = [dict(DOCTOR)]
    for name in known():
        scenario = load(name)
        about = {"name": name, "what": scenario.what, "paper": scenario.paper, "minutes": scenario.minutes}
        try:
            listed.append({**about, "backend": backend_of(scenario, every=every), "runs": True, "why": ""})
        except LocalError as error:
            listed.append({**about, "backend": None, "runs": False, "why": str(error)})
    if as_json:
        click.echo(json.dumps(listed))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("scenario", "what", "after", "minutes", "here")
    for each in listed:
        here = each.get("backend") or each.get("why") or ""
        table.add_row(
            each["name"],
            escape(each["what"]),
            escape(each.get("paper", "")),
            f"{each.get('minutes', '')}",
            escape(here),
        )
    console().print(table)


@lab.command()
@JSON
def doctor(as_json: bool) -> None:
    """Try each kernel feature that network emulation needs: namespaces, links, a bridge, qdiscs. Look for user-mode
    Linux too. Removes all that it creates.
    """
    from netem.emulation.doctor import backends, chosen, document, probe

    checks = probe()
    if as_json:
        click.echo(json.dumps(document(checks)))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("feature", "works", "reason", "remedy")
    for check in checks:
        table.add_row(check.name, "[green]yes" if check.ok else "[red]no", escape(check.reason), escape(check.install))
    console().print(table)
    every = backends(checks)
    for backend in every:
        lacks = f"; lacks {', '.join(backend.lacks)}" if backend.lacks else ""
        click.echo(f"{backend.name}: {'yes' if backend.ok else 'no'}, {backend.what}{lacks}")
    click.echo(f"chosen: {chosen(every)}")


def _command(name: str) -> click.Command:
    @click.command(name)
    @click.option(
        "--backend", type=click.Choice(["auto", "native", "uml", "rate"]), default="auto",
        help="Emulation backend, instead of the scenario's.",
    )  # fmt: skip
    @click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE",
        help=(
            "Value in place of the scenario's: of a parameter, or of a key such as hosts.NAME.KEY. A list is swept, "
            "one case a value, unless the parameter is a list itself. Repeatable."
        ),
    )  # fmt: skip
    @click.option(
        "--only", type=click.IntRange(1), multiple=True, help="Number of a case to run, without the others; repeatable."
    )
    @click.option(
        "-o",
        "--output",
        "folder",
        type=PATH,
        help="Folder for the JSON document and the plots.  [default: lab-out/SCENARIO]",
    )
    @JSON
    def scenario(
        backend: str, settings: tuple[str, ...], only: tuple[int, ...], folder: Path | None, as_json: bool
    ) -> None:  # fmt: skip
        """Run the scenario. Prints a table, and writes a JSON document and plots to a folder."""
        _run(name, backend, dict(map(_setting, settings)), only, folder, as_json)

    return scenario


def _setting(text: str) -> tuple[str, object]:
    """The key and value of KEY=VALUE. A value that is not TOML is a string. Raises UsageError."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text!r}: write KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _run(
    name: str, backend: str, settings: dict[str, object], only: tuple[int, ...], folder: Path | None, as_json: bool
) -> None:  # fmt: skip
    """Run a scenario and write its document and plots, also when a case failed or was left out. Then the exit code is
    ``EXIT_FAILED``.
    """
    from netem.lab.scenario_plots import draw
    from netem.lab.scenario_report import sentences, table
    from netem.lab.scenario_run import backend_of, load, run
    from p2pcast.files.atomic_files import explained

    scenario = load(name, settings)
    folder = folder or Path("lab-out") / scenario.name
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    document = run(scenario, backend_of(scenario, backend), only, lambda said: click.echo(said, err=True))
    words = [
        *(f"--set {key}={json.dumps(value)}" for key, value in settings.items()),
        *(f"--only {number}" for number in only),
    ]
    document["command"] = " ".join(
        ["p2pcast lab", name, *words, *(["--backend", backend] if backend != "auto" else [])]
    )
    write_document(document, folder / RESULT)
    try:
        drawn = draw(scenario.plots, document, folder)
    except LocalError as error:
        drawn = []
        click.echo(f"no plots: {error}", err=True)
    if as_json:
        click.echo(json.dumps(document))
    else:
        console().print(table(document))
        for line in sentences(document):
            click.echo(line)
        for path in (folder / RESULT, *drawn):
            click.echo(path)
    if document["failed"] or not document["rows"] or any(each["off"] for each in document["calibrations"]):
        sys.exit(EXIT_FAILED)
