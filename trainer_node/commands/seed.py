"""``p2pcast seed``: run the hub."""

from __future__ import annotations

from functools import partial

import click

from p2pcast.cli.settings import options
from p2pcast.process import event_loop
from trainer_node.hub_config import HubConfig


@click.command()
@options(HubConfig, "seed")
def seed(config: HubConfig) -> None:
    """Publish every new CHECKPOINTS/step_N/ (a Hugging Face safetensors folder) to all peers that join.

    A trainer's own processes can publish too (trainer_node.Publisher), with or without CHECKPOINTS.

    \b
    Examples:
      p2pcast seed runs/math --base Qwen3-4B
      p2pcast seed --listen 0.0.0.0:7077 --uplink 1gbit --token-file token
      p2pcast seed runs/math --commit barrier --mirror s3://bucket/run
    """
    from p2pcast.process.daemon_process import (
        keep_freed_memory,
        name_fatal_signals,
        raise_descriptor_limit,
        restrict_umask,
        run_until_signal,
    )
    from trainer_node.hub import run_hub

    checked = config.checked()
    restrict_umask()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        await run_until_signal(partial(run_hub, checked))

    event_loop.run(work())
