"""``p2pcast demo``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from p2pcast.cli.options import PATH
from p2pcast.ground.errors import EXIT_FAILED, UsageError

BROADCAST = ("versions", "pace", "no_vllm")
"""Parameters of the broadcast's demo alone."""
RUN = ("steps", "seed")


@click.command()
@click.option("--dir", "folder", type=PATH, default="demo-out", help="Work folder; replaces that of an earlier demo.")
@click.option("--broadcast", is_flag=True, help="Demo of the broadcast alone: a trainer's versions, peers and a vLLM.")
@click.option(
    "--steps", type=click.IntRange(20), default=60, help="Number of learner steps whose rewards are compared."
)
@click.option(
    "--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, help="Seed of the prompts; the first model is the same."
)
@click.option("--peers", type=click.IntRange(3), help="Number of peers.  [default: 4; 5 with --broadcast]")
@click.option(
    "--versions",
    type=click.IntRange(4),
    default=10,
    help="With --broadcast: number of versions that the trainer publishes.",
)
@click.option(
    "--pace",
    type=click.FloatRange(0),
    default=1.0,
    help="With --broadcast: shortest time in seconds between two versions.",
)
@click.option("--no-vllm", is_flag=True, help="With --broadcast: a demo without the vLLM server and its traffic.")
@click.option(
    "--keep", is_flag=True, help="Weights and state folders kept after a PASS, in addition to logs and result."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; other output goes to stderr.")
@click.pass_context
def demo(
    context: click.Context,
    folder: Path,
    broadcast: bool,
    steps: int,
    seed: int,
    peers: int | None,
    versions: int,
    pace: float,
    no_vllm: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Train a small Qwen3 by GRPO on rollouts of a live vLLM engine, whose weights peers broadcast. A worker, a peer
    and the learner are killed meanwhile, and everything is verified at the end.

    \b
    Examples:
      p2pcast demo
      p2pcast demo --steps 100 --keep
      p2pcast demo --broadcast
      p2pcast demo --broadcast --no-vllm --peers 8 --pace 0
    """
    for name in RUN if broadcast else BROADCAST:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            where = "without" if broadcast else "with"
            raise UsageError(f"--{name.replace('_', '-')} is an option of a demo {where} --broadcast")
    console = Console(stderr=as_json)
    if broadcast:
        from netem.demo.script import demo as run
        from netem.demo.version_board import VersionBoard
        from netem.fleet.participants import ParticipantOptions

        board = VersionBoard(console)
        result = run(ParticipantOptions(folder, versions, peers or 5, not no_vllm, keep, pace), board)
        _show(result, board, as_json=as_json)
        return
    from netem.demo.board import Board
    from netem.fleet.rl_participants import RlOptions
    from netem.rl_demo.rl_script import rl_demo
    from netem.rl_demo.rl_view import RlView

    view = RlView()
    whole = Board(console, view)
    options = RlOptions(folder, steps=steps, peers=peers or 4, prompts_seed=seed, keep=keep)
    _show(rl_demo(options, whole, view), whole, as_json=as_json)


def _show(result: dict[str, Any], board: Any, *, as_json: bool) -> None:
    board.checks(result["checks"])
    board.print_line(f"{result['verdict']} in {result['elapsed_s']:.0f} s; logs are in {result['folder']}/logs")
    if picture := result.get("picture"):
        board.print_line(f"picture of the run: {picture}")
    if as_json:
        click.echo(json.dumps(result))
    if result["verdict"] == "FAIL":
        sys.exit(EXIT_FAILED)
