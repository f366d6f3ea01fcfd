"""``p2pcast join``: run a peer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from p2pcast.cli.settings import options
from p2pcast.process import event_loop
from rollout_node.peer_config import PeerConfig


@click.command()
@options(PeerConfig, "join")
def join(config: PeerConfig) -> None:
    """Receive every version of the run at HUB, relay it to other peers, and install it. Without HUB, read versions from
    the run's mirror (--from) alone.

    \b
    Examples:
      p2pcast join hub.example:7077 --token-file token --install vllm:http://127.0.0.1:8000
      p2pcast join hub.example:7077 --base Qwen3-4B --install safetensors:/models/latest --keep 2
      p2pcast join --from s3://bucket/run --install exec:./reload.sh
    """
    from p2pcast.process.daemon_process import (
        keep_freed_memory,
        name_fatal_signals,
        raise_descriptor_limit,
        restrict_umask,
        run_until_signal,
    )
    from rollout_node.engine.callbacks import load
    from rollout_node.peer_daemon import PeerDaemon

    checked = config.checked()
    if checked.callbacks is not None:
        checked = replace(checked, callbacks=load(checked.callbacks, Path.cwd()))
    restrict_umask()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        daemon = PeerDaemon(checked)
        await run_until_signal(daemon.run, daemon.drain)

    event_loop.run(work())
