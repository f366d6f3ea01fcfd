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
@click.option("--dir", "folder", type=PATH, default="demo-out", help="Work folder; replaces that of an earlier demo.")
@click.option("--versions", type=click.IntRange(4), default=10, help="Number of versions that the trainer publishes.")
@click.option("--peers", type=click.IntRange(3), default=5, help="Number of peers.")
@click.option("--pace", type=click.FloatRange(0), default=1.0, help="Shortest time in seconds between two versions.")
@click.option("--no-vllm", is_flag=True, help="A demo without the vLLM server and its traffic.")
@click.option(
    "--keep",
    is_flag=True,
    help="Checkpoints and state folders kept after a PASS, in addition to logs and the result.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout; other output goes to stderr.")
def demo(folder: Path, versions: int, peers: int, pace: float, no_vllm: bool, keep: bool, as_json: bool) -> None:
    """Train a small Qwen3, broadcast its versions to peers and a live vLLM server, kill a peer meanwhile, and verify
    every byte.

    \b
    Examples:
      p2pcast demo
      p2pcast demo --no-vllm --peers 8 --pace 0
    """
    from netem.demo.commands import Options
    from netem.demo.script import demo as run
    from netem.demo.version_board import VersionBoard

    board = VersionBoard(Console(stderr=as_json))
    result = run(Options(folder, versions, peers, not no_vllm, keep, pace), board)
    board.checks(result["checks"])
    board.print_line(f"{result['verdict']} in {result['elapsed_s']:.0f} s; logs are in {result['folder']}/logs")
    if as_json:
        click.echo(json.dumps(result))
    if result["verdict"] == "FAIL":
        sys.exit(EXIT_FAILED)
