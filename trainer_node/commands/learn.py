"""``p2pcast learn``: train on rollouts of a ledger, and publish the new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from p2pcast.cli import config as config_file
from p2pcast.cli import exit_code
from p2pcast.cli.settings import PATH, made, settings_of
from p2pcast.cli.settings import table as table_of
from p2pcast.ground.errors import UsageError


@click.command()
@click.argument("config", type=PATH, envvar="P2PCAST_LEARN_CONFIG")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Setting that replaces one of the file, as in optimizer.lr=3e-4. Repeatable.",
)
@click.option("--print-config", is_flag=True, help="The resolved configuration on stdout; nothing is trained.")
@click.option("--plot", is_flag=True, help="Picture of the run so far, RUN/run.png; nothing is trained.")
@click.option(
    "--from-start",
    is_flag=True,
    help="Begin with what the checkpoint folder holds, or at step 0, though ledger or hub hold later steps.",
)
def learn(config: Path, overrides: tuple[str, ...], print_config: bool, plot: bool, from_start: bool) -> None:
    """Train on rollouts of a ledger as the TOML file CONFIG says, and publish the new weights through a hub.

    \b
    Examples:
      p2pcast learn run.toml
      p2pcast learn run.toml --set optimizer.lr=3e-4 --print-config
      torchrun --nproc-per-node 4 -m p2pcast.cli learn run.toml
      p2pcast learn run.toml --plot

    SIGTERM ends the learner after its step; the same command continues from the newest checkpoint.
    """
    from trainer_node.learning.learner_config import LearnerConfig

    resolved = read(config, overrides)
    if print_config:
        click.echo(show(resolved), nl=False)
        return
    checked: LearnerConfig = resolved.checked()
    if plot:
        from trainer_node.learning.monitoring.run_log import read_run
        from trainer_node.learning.monitoring.run_plot import plot_run

        picture = checked.checkpoint.folder / "run.png"  # the file that is written at the end of a run
        plot_run(read_run(checked.checkpoint.folder), picture)
        click.echo(picture)
        return
    from p2pcast.process.daemon_process import restrict_umask
    from trainer_node.learning.learner_startup import run_learner
    from trainer_node.learning.trainer_ranks import by_torchrun, leave

    restrict_umask()
    if by_torchrun():
        leave(exit_code(lambda: run_learner(checked, from_start=from_start)))
    run_learner(checked, from_start=from_start)


def read(path: Path, overrides: tuple[str, ...] = ()) -> Any:
    """Read a configuration file and replace ``TABLE.KEY=VALUE``. Raises UsageError."""
    from trainer_node.learning.learner_config import TABLES, LearnerConfig

    group = click.Group("learn", commands={name: table_of(kind, name) for name, kind in TABLES.items()})
    values = config_file.tables(path, group)
    for override in overrides:
        table, key, value = _override(override)
        command = group.commands.get(table)
        option = next((o for o in command.params if o.opts == [f"--{key}"]), None) if command else None
        if command is None or option is None or option.name is None:
            known = ", ".join(TABLES) if command is None else ", ".join(o.opts[0][2:] for o in command.params)
            raise UsageError(f"--set {override}: unknown {'table' if command is None else 'key'}; known are {known}")
        try:
            values[table][option.name] = option.type.convert(value, option, click.Context(command))
        except click.BadParameter as error:
            raise UsageError(f"--set {override}: {error.message}") from None
    return LearnerConfig(**{name: made(kind, values[name]) for name, kind in TABLES.items()})


def show(resolved: Any) -> str:
    """Return the configuration as TOML, with an explanation of each key."""
    from trainer_node.learning.learner_config import TABLES

    lines = []
    document = resolved.document()
    for name, kind in TABLES.items():
        lines.append(f"[{name}]")
        helps = {each.name.replace("_", "-"): each.help for each in settings_of(kind)}
        for key, value in document[name].items():
            text = "" if value is None else f"{key} = {json.dumps(value)}"
            lines += [f"# {helps[key]}", text or f"# {key} ="]
        lines.append("")
    return "\n".join(lines)


def _override(text: str) -> tuple[str, str, str]:
    name, found, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not found or not dot:
        raise UsageError(f"--set {text}: write TABLE.KEY=VALUE, as in optimizer.lr=3e-4")
    return table, key, value.strip()
