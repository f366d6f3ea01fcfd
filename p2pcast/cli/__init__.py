"""The ``p2pcast`` command. Each subcommand's module is imported when it is used, so that ``--help`` is quick and nothing heavy is loaded in vain.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused, 4 unreachable. Errors are one line on stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from p2pcast import logs
from p2pcast.cli import config
from p2pcast.errors import EXIT_FAILED, EXIT_USAGE, P2PCastError

COMMANDS = {
    "seed": ("p2pcast.cli.seed:seed", "Publish every new checkpoint to all peers that join."),
    "join": ("p2pcast.cli.join:join", "Receive every version of a run, pass it on, install it."),
    "status": ("p2pcast.cli.status:status", "Show the run, or one peer."),
    "commit": ("p2pcast.cli.status:commit", "Let engines switch to a version."),
    "token": ("p2pcast.cli.trust:token", "Make, list and revoke join tokens."),
    "evict": ("p2pcast.cli.trust:evict", "Cut a peer off, for good."),
    "delta": ("p2pcast.cli.delta:delta", "Make, apply and squash deltas in files."),
    "inspect": ("p2pcast.cli.inspect:inspect", "Say what is in a delta, an anchor or a checkpoint."),
    "check": ("p2pcast.cli.state_folder:check", "Read every byte of a state folder; set aside what is damaged."),
    "verify": ("p2pcast.cli.verify:verify", "Check a folder against a delta or a hub."),
    "bench": ("p2pcast.cli.bench:bench", "Measure this installation."),
    "simulate": ("p2pcast.cli.simulate:simulate", "The hub's decisions about a fleet of thousands, with churn."),
    "lab": ("p2pcast.cli.lab:lab", "Experiments on emulated WANs; what this machine can emulate."),
    "demo": ("p2pcast.cli.demo:demo", "Train, broadcast and serve a small model here, and check it all."),
}
"""Name → (module:attribute, what it does)."""


class LazyGroup(click.Group):
    """Finds commands in a table and imports them when they run."""

    def __init__(self, *args: Any, table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "P2PCAST"},
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=config.option,
    help="TOML file with options: a table for each command.",
)
@click.option(
    "--log-format", type=click.Choice(logs.FORMATS), default="auto", show_default=True, help="Form of the log lines on stderr."
)
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@click.version_option(package_name="p2pcast", allow_from_autoenv=False)
def cli(log_format: str, verbose: bool) -> None:
    """Peer-to-peer broadcast of a language model's new weights, from an RL trainer to rollout GPUs over ordinary WAN links."""
    logs.set_up(log_format, verbose=verbose)


def main() -> None:
    """Run a command and end the process with its exit code."""
    try:
        cli(prog_name="p2pcast", standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except P2PCastError as error:
        click.echo(f"p2pcast: {error}", err=True)
        sys.exit(error.exit_code)
    except BaseExceptionGroup as group:
        sys.exit(_first(group))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def _first(group: BaseExceptionGroup[BaseException]) -> int:
    """A daemon's tasks end together: the reason is the error that is ours."""
    known, other = group.split(P2PCastError)
    if other is not None:
        raise other
    assert known is not None
    error: BaseException = known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, P2PCastError)
    click.echo(f"p2pcast: {error}", err=True)
    return error.exit_code
