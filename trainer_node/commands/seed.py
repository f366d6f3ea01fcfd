"""``p2pcast seed``: run the hub."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, MarkerStyle, StepNames
from p2pcast.cli.options import (
    PATH,
    Address,
    Rate,
    congestion,
    http_per_address,
    plaintext,
    retention,
    seconds,
    shadow_days,
    step_folders,
)
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_KEPT
from p2pcast.process import event_loop
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.store.retention import ANCHOR_EVERY, Counts


@click.command()
@click.argument("checkpoints", type=PATH, required=False, envvar="P2PCAST_SEED_CHECKPOINTS")
@click.option(
    "--base",
    type=PATH,
    help="Hugging Face folder of version 0; a peer that has the same folder downloads only deltas.",
)
@click.option(
    "--quantise",
    type=click.Choice(list(KINDS)),
    help=(
        "Kind of quantised state that CHECKPOINTS and --base are published as, with its scales; for engines that load "
        "this form.  [default: as trained]"
    ),
)
@step_folders("in CHECKPOINTS")
@click.option(
    "--listen",
    type=Address("", 7077),
    default=":7077",
    help="Address on which the hub accepts peers and trainer ranks.",
)
@click.option("--advertise", type=Address(), help="Address of the hub in the printed join command.")
@click.option(
    "--http",
    type=Address("127.0.0.1"),
    default="127.0.0.1:7078",
    help="Address of the HTTP server for status, metrics and commands.",
)
@http_per_address
@click.option("--state", type=PATH, help="Folder for the run's key, versions and membership.")
@click.option("--shadow", type=PATH, help="Folder in tmpfs for the current weights in memory (the size of the model).")
@shadow_days
@click.option(
    "--uplink",
    type=Rate(),
    help=(
        "Upload rate of the hub in bits per second, which decides the number of chains.  [default: measured; 1gbit "
        "until then]"
    ),
)
@click.option(
    "--chains", type=click.IntRange(1), help="Number of chains.  [default: from --uplink and the peers' measured rates]"
)
@click.option(
    "--peer-cap",
    type=Rate(),
    help=(
        "Rate in bits per second that counts as full speed in a peer's score.  [default: the fastest peer's rate, at "
        "least 100mbit]"
    ),
)
@click.option(
    "--region",
    default="",
    show_default=False,
    help="Label of the hub's site. Peers with another label share one WAN path to the hub.",
)
@click.option(
    "--commit",
    type=click.Choice(["auto", "manual", "barrier"]),
    default="auto",
    help="When engines switch to a version. auto: once staged; manual: on `p2pcast commit`; barrier: all at once.",
)
@click.option(
    "--barrier-timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help=(
        "With --commit barrier: longest wait in seconds, from the first peer that has staged a version.  [default: 30]"
    ),
)
@click.option(
    "--barrier-quorum",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help=(
        "With --commit barrier: share of the peers, 0 to 1, that must have staged the version in time.  [default: 0.9]"
    ),
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    help=(
        "Codec of changed cells; auto: for each version, the codec with the earliest last arrival, or a smaller one "
        "that is hardly later."
    ),
)
@click.option(
    "--max-lag",
    type=click.IntRange(0),
    help=(
        "Greatest lag of any peer's engines, in versions, at which the hub begins another version.  [default: no limit]"
    ),
)
@seconds(
    "seed",
    "max-lag-wait",
    click.FloatRange(0),
    300.0,
    "With --max-lag: longest time in seconds for which one peer may hold back versions; 0: no limit.",
)
@seconds(
    "seed",
    "rank-timeout",
    click.FloatRange(0),
    600.0,
    "Longest time in seconds for which the trainer's other ranks wait for a missing rank; 0: no limit.",
)
@click.option(
    "--anchor-every",
    type=click.IntRange(1, MAX_KEPT),
    metavar="N",
    help=f"Number of versions between anchors, the whole states for peers that join late.  [default: {ANCHOR_EVERY}]",
)
@retention
@click.option(
    "--token-file",
    type=PATH,
    help=(
        "File for the join token, mode 0600; the hub writes the next token before the last one expires.  [default: "
        "STATE/token]"
    ),
)
@click.option(
    "--token-hours",
    type=click.FloatRange(0, 8760, min_open=True),
    default=24,
    help="Lifetime of a join token in hours; renewed after one half.",
)
@click.option(
    "--no-squashes",
    is_flag=True,
    help="No squashes (one delta in place of many) for late peers: less disk, slower catch-up.",
)
@click.option(
    "--mirror", metavar="URL", help="Object store for a copy of the run: s3://BUCKET/PREFIX or file:///FOLDER."
)
@click.option(
    "--mirror-rate",
    type=Rate(),
    metavar="RATE",
    help="Constant upload rate to the mirror in bits per second.  [default: in the gaps between broadcasts]",
)
@congestion
@click.option(
    "--certificate-days",
    type=click.FloatRange(0, 3650, min_open=True),
    default=14,
    help="Certificate lifetime in days; renewed after one third.",
)
@click.option(
    "--recall",
    type=click.FloatRange(0, 3600),
    default=10.0,
    metavar="SECONDS",
    help=(
        "Longest wait in seconds, after a restart, for peers that have versions which the state folder lacks. Ends "
        "early once all former peers are back."
    ),
)
@plaintext
def seed(
    checkpoints: Path | None,
    base: Path | None,
    quantise: str | None,
    step_names: StepNames,
    step_marker: MarkerStyle,
    listen: tuple[str, int],
    advertise: tuple[str, int] | None,
    http: tuple[str, int],
    http_per_address: int | None,
    state: Path | None,
    shadow: Path | None,
    shadow_days: float,
    uplink: float | None,
    chains: int | None,
    peer_cap: float | None,
    region: str,
    commit: str,
    barrier_timeout: float | None,
    barrier_quorum: float | None,
    codec: str,
    max_lag: int | None,
    max_lag_wait_s: float,
    rank_timeout_s: float,
    anchor_every: int | None,
    keep_deltas: int | None,
    keep_anchors: int | None,
    token_file: Path | None,
    token_hours: float,
    no_squashes: bool,
    mirror: str | None,
    mirror_rate: float | None,
    congestion: str | None,
    certificate_days: float,
    recall: float,
    plaintext: bool,
) -> None:
    """Publish every new CHECKPOINTS/step_N/ (a Hugging Face safetensors folder) to all peers that join.

    A trainer's own processes can publish too (trainer_node.Publisher), with or without CHECKPOINTS.

    \b
    Examples:
      p2pcast seed runs/math --base Qwen3-4B
      p2pcast seed --listen 0.0.0.0:7077 --uplink 1gbit --token-file token
      p2pcast seed runs/math --commit barrier --mirror s3://bucket/run
    """
    from p2pcast.process.daemon_process import (
        default_shadow,
        keep_freed_memory,
        name_fatal_signals,
        raise_descriptor_limit,
        restrict_umask,
        run_until_signal,
        state_home,
    )
    from p2pcast.transport.socket_options import choose_sockets
    from trainer_node.hub import run_hub
    from trainer_node.hub_config import HubConfig

    if commit != "barrier" and (barrier_timeout, barrier_quorum) != (None, None):
        raise UsageError("--barrier-timeout and --barrier-quorum need --commit barrier")
    if mirror_rate is not None and mirror is None:
        raise UsageError("--mirror-rate needs --mirror")
    folder = state or state_home() / "hub"
    config = HubConfig(
        checkpoints=checkpoints,
        folder_form=FolderForm(step_names, MARKERS[step_marker]),
        state=folder,
        shadow=shadow or default_shadow(folder),
        shadow_days=shadow_days,
        base=base,
        quantise=quantise,
        listen=listen,
        advertise=advertise,
        http=http,
        http_per_address=http_per_address,
        uplink_bps=uplink,
        chains=chains,
        peer_cap_bps=peer_cap,
        region=region,
        commit=commit,
        barrier_timeout_s=30.0 if barrier_timeout is None else barrier_timeout,
        barrier_quorum=0.9 if barrier_quorum is None else barrier_quorum,
        codec=codec,
        max_lag=max_lag,
        max_lag_wait_s=max_lag_wait_s,
        rank_timeout_s=rank_timeout_s,
        anchor_every=anchor_every,
        counts=Counts(keep_deltas, keep_anchors),
        token_file=token_file or (folder / "token"),
        squashes=not no_squashes,
        mirror=mirror,
        mirror_bps=mirror_rate,
        sockets=choose_sockets(congestion),
        plaintext=plaintext,
        certificate_s=86400 * certificate_days,
        token_ttl_s=3600 * token_hours,
        recall_s=recall,
    )

    restrict_umask()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        await run_until_signal(partial(run_hub, config))

    event_loop.run(work())
