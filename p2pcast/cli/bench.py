"""``p2pcast bench``: measurements that anybody can repeat, each beside a rival or a limit in the same run."""

from __future__ import annotations

import click

from p2pcast.cli import LazyGroup

COMMANDS = {
    "codec": ("p2pcast.cli.bench_codec:codec", "Size and speed of the delta codec, beside PULSE's format and a scan."),
    "squash": (
        "p2pcast.cli.bench_squash:squash",
        "Deltas joined into one: size and time beside the chain's, and what a ladder saves.",
    ),
    "device": ("p2pcast.cli.bench_device:device", "The dense passes with torch's operations, on a GPU or the CPU."),
    "relay": ("p2pcast.cli.bench_relay:relay", "CPU and memory of a peer in the middle of a chain."),
    "faults": ("p2pcast.cli.bench_faults:faults", "Each fault in mid-broadcast: how soon bytes flow again, when all have it."),
    "simulated": (
        "p2pcast.cli.bench_simulated:simulated",
        "Broadcasts that are measured, and the same ones simulated, side by side.",
    ),
    "soak": (
        "p2pcast.cli.bench_soak:soak",
        "Many versions while peers die, freeze, slow down and come back: bits, times, leaks.",
    ),
    "siege": ("p2pcast.cli.bench_siege:siege", "Versions while ten thousand connections mean no good."),
    "catchup": ("p2pcast.cli.bench_catchup:catchup", "A peer that was away: bytes and time by each way back."),
    "heal": ("p2pcast.cli.bench_heal:heal", "Cells of a shadow that rot: what is fetched to put them right, and the time."),
    "anchors": ("p2pcast.cli.bench_anchors:anchors", "What versions take while the hub writes an anchor, beside those without."),
    "kills": (
        "p2pcast.cli.bench_kills:kills",
        "A hub, peers and a follower killed at any step of their disks and mirror, again and again.",
    ),
    "broadcast": (
        "p2pcast.cli.bench_broadcast:broadcast",
        "Time to the last peer over rate-shaped links, beside bare chains, libtorrent and a star.",
    ),
    "stripes": (
        "p2pcast.cli.bench_stripes:stripes",
        "One link over emulated delay and loss, by its number of stripes, beside what a peer chooses.",
    ),
    "plan": ("p2pcast.cli.bench_plan:plan", "What the hub's decisions about ten thousand peers take."),
    "publish": ("p2pcast.cli.bench_publish:publish", "What publishing live tensors costs a training step, beside a memcpy."),
    "live": ("p2pcast.cli.bench_live:live", "Versions into a live vLLM under load, beside its own dense reload."),
}


@click.group(cls=LazyGroup, table=COMMANDS)
def bench() -> None:
    """Measure this installation."""
