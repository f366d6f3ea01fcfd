"""``p2pcast bench``: measurements that anybody can repeat, each beside a rival or a limit in the same run."""

from __future__ import annotations

import click

from p2pcast.cli import LazyGroup

COMMANDS = {
    "codec": "p2pcast.cli.bench_codec:codec",
    "relay": "p2pcast.cli.bench_relay:relay",
}


@click.group(cls=LazyGroup, table=COMMANDS)
def bench() -> None:
    """Measure this installation."""
