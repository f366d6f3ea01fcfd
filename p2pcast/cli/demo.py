"""``p2pcast demo``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from p2pcast.cli.options import PATH
from p2pcast.errors import EXIT_FAILED


@click.command()
@click.option(
    "--dir", "folder", type=PATH, default="demo-out", show_default=True, help="Work folder; an earlier demo's is replaced."
)
@click.option("--versions", type=click.IntRange(4), default=10, show_default=True, help="How many the trainer publishes.")
@click.option("--peers", type=click.IntRange(3), default=5, show_default=True)
@click.option(
    "--pace", type=click.FloatRange(0), default=1.0, show_default=True, help="Seconds from one version to the next, at least."
)
@click.option("--no-vllm", is_flag=True, help="Leave out the vLLM server and its traffic.")
@click.option(
    "--keep", is_flag=True, help="Keep checkpoints and state too; without it only logs and the result stay after a PASS."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; the rest goes to stderr.")
def demo(folder: Path, versions: int, peers: int, pace: float, no_vllm: bool, keep: bool, as_json: bool) -> None:
    """Train a small Qwen3, broadcast its versions to peers and a live vLLM server, kill a peer on the way, and check every byte."""
    from p2pcast.demo.board import Board
    from p2pcast.demo.cast import Options
    from p2pcast.demo.run import demo as run

    board = Board(Console(stderr=as_json))
    result = run(Options(folder, versions, peers, not no_vllm, keep, pace), board)
    board.checks(result["checks"])
    board.say(f"{result['verdict']} in {result['elapsed_s']:.0f} s; logs are in {result['folder']}/logs")
    if as_json:
        click.echo(json.dumps(result))
    if result["verdict"] == "FAIL":
        sys.exit(EXIT_FAILED)
