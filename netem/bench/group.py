"""``p2pcast bench``: repeatable measurements, each beside a rival or a physical limit in the same run."""

from __future__ import annotations

import click

from p2pcast.cli import LazyGroup

COMMANDS = {
    "codec": (
        "netem.bench.commands.codec_commands:codec",
        "Size and speed of the delta codec, beside PULSE's format and a scan.",
    ),
    "squash": (
        "netem.bench.commands.codec_commands:squash",
        "Size and time of a squash beside its deltas, and the saving of a ladder of squashes.",
    ),
    "device": (
        "netem.bench.commands.codec_commands:device",
        "Speed of the dense passes with torch operations, on a GPU or the CPU.",
    ),
    "relay": ("netem.bench.commands.fleet_commands:relay", "CPU and memory of a peer in the middle of a chain."),
    "simulated": (
        "netem.bench.commands.fleet_commands:simulated",
        "Measured broadcasts beside the same broadcasts in the simulator.",
    ),
    "catchup": (
        "netem.bench.commands.fleet_commands:catchup",
        "Bytes and time for a late peer, by each way to catch up.",
    ),
    "heal": (
        "netem.bench.commands.fleet_commands:heal",
        "Bytes and time for the repair of corrupt cells of a shadow.",
    ),
    "anchors": (
        "netem.bench.commands.fleet_commands:anchors",
        "Time of versions while the hub writes an anchor, beside versions without.",
    ),
    "broadcast": (
        "netem.bench.commands.fleet_commands:broadcast",
        "Time to the last peer over rate-shaped links, beside bare chains, libtorrent and a star.",
    ),
    "latency": (
        "netem.bench.commands.latency_command:latency",
        "Time until small versions are live at the last peer, by stage.",
    ),
    "sparse": (
        "netem.bench.commands.engine_commands:sparse",
        "Decoding speed with sparse and with dense attention, by length of the text.",
    ),
    "page": ("netem.bench.commands.hub_commands:page", "Cost of the run's page at the hub and in a browser."),
    "start": ("netem.bench.commands.hub_commands:start", "Time of a hub's start, end, and restart after kill -9."),
    "stripes": (
        "netem.bench.commands.stripes_command:stripes",
        "Goodput of one link over emulated delay and loss, by number of stripes.",
    ),
    "ledger": (
        "netem.bench.commands.hub_commands:ledger",
        "Results per second of a ledger, and times of its requests with a thousand workers.",
    ),
    "plays": (
        "netem.bench.commands.hub_commands:plays",
        "Cost of a turn of a play in a process of its own, beside a turn in the worker's process.",
    ),
    "plan": ("netem.bench.commands.hub_commands:plan", "Time of the hub's planning decisions for ten thousand peers."),
    "quantised": (
        "netem.bench.commands.codec_commands:quantised",
        "Bytes of a version in each quantised form, and the divergence of quantised engines from the learner.",
    ),
    "publish": (
        "netem.bench.commands.hub_commands:publish",
        "Time that publishing live tensors adds to a training step, beside a memcpy.",
    ),
    "live": (
        "netem.bench.commands.engine_commands:live",
        "Pause of a live vLLM under load at each version, beside vLLM's own dense reload.",
    ),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def bench() -> None:
    """Measure this installation. Every command prints a table; --json and -o give a document.

    \b
    Examples:
      p2pcast bench codec
      p2pcast bench relay --payload 64 -o relay.json
    """
