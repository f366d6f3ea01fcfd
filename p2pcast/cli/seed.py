"""``p2pcast seed``: the hub."""

from __future__ import annotations

from pathlib import Path

import click

from p2pcast import event_loop
from p2pcast.cli.options import PATH, Address, Rate, congestion, plaintext, retention, seconds
from p2pcast.errors import UsageError
from p2pcast.limits import MAX_KEPT
from p2pcast.store.retention import ANCHOR_EVERY, Counts


@click.command()
@click.argument("checkpoints", type=PATH, required=False, envvar="P2PCAST_SEED_CHECKPOINTS")
@click.option("--base", type=PATH, help="Hugging Face folder that is version 0; peers that have it download nothing at first.")
@click.option("--listen", type=Address("", 7077), default=":7077", show_default=True, help="Where peers and ranks connect.")
@click.option("--advertise", type=Address(), help="Address that the printed join line names.")
@click.option("--http", type=Address("127.0.0.1"), default="127.0.0.1:7078", show_default=True, help="Status and metrics.")
@click.option("--state", type=PATH, help="Folder for key, versions and membership.")
@click.option("--shadow", type=PATH, help="Folder in tmpfs for the state in memory (1 x the model).")
@click.option(
    "--uplink",
    type=Rate(),
    help="This side's upload rate, which decides the number of chains.  [default: measured; 1gbit until then]",
)
@click.option("--chains", type=click.IntRange(1), help="Number of chains, instead of what --uplink and measured rates say.")
@click.option(
    "--peer-cap",
    type=Rate(),
    help="Rate of a peer that counts as full speed in its score.  [default: the fastest peer's, 100mbit at least]",
)
@click.option("--region", default="", help="Label of this site: peers that name another one are taken to share the way there.")
@click.option(
    "--commit",
    type=click.Choice(["auto", "manual", "barrier"]),
    default="auto",
    show_default=True,
    help="Engines switch by themselves, or on `p2pcast commit`, or all at once.",
)
@click.option(
    "--barrier-timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="With --commit barrier: how long the first peer that has staged a version waits for the others.  [default: 30]",
)
@click.option(
    "--barrier-quorum",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="With --commit barrier: the share of the peers that must have staged it by then.  [default: 0.9]",
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    show_default=True,
    help="Codec of changed cells; auto: for each version, the quickest to reach the last peer, or a smaller one that is hardly slower.",
)
@click.option(
    "--max-lag",
    type=click.IntRange(0),
    help="Begin no version while a peer's engines are more than this many versions behind.",
)
@seconds(
    "seed",
    "max-lag-wait",
    click.FloatRange(0),
    300.0,
    "With --max-lag: greatest time for which one peer may hold back versions; 0: no limit.",
)
@seconds(
    "seed",
    "rank-timeout",
    click.FloatRange(0),
    600.0,
    "Greatest time for which a trainer's rank may keep the other ranks waiting; 0: no limit.",
)
@click.option(
    "--anchor-every",
    type=click.IntRange(1, MAX_KEPT),
    metavar="N",
    help=f"Versions between the whole states that the hub writes for peers that join late.  [default: {ANCHOR_EVERY}]",
)
@retention
@click.option(
    "--token-file", type=PATH, help="File for the join token (mode 0600); gets the next token before the last one expires."
)
@click.option(
    "--token-hours",
    type=click.FloatRange(0, 8760, min_open=True),
    default=24,
    show_default=True,
    help="Lifetime of the join token in hours; the token file gets the next one after half of it.",
)
@click.option("--no-squashes", is_flag=True, help="Keep and make no squashed deltas for late peers: less disk, slower returns.")
@click.option("--mirror", metavar="URL", help="Keep a copy of the run there: s3://BUCKET/PREFIX or file:///FOLDER.")
@click.option(
    "--mirror-rate",
    type=Rate(),
    metavar="RATE",
    help="Upload to the mirror at this rate, whatever else goes on.  [default: in the gaps of live traffic]",
)
@congestion
@click.option(
    "--certificate-days",
    type=click.FloatRange(0, 3650, min_open=True),
    default=14,
    show_default=True,
    help="Certificate lifetime in days; renewed after one third.",
)
@click.option(
    "--recall",
    type=click.FloatRange(0, 3600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Wait after a restart, before the first new version, for peers to show versions that this state lacks. Ends early once the last process's peers are back.",
)
@plaintext
def seed(
    checkpoints: Path | None,
    base: Path | None,
    listen: tuple[str, int],
    advertise: tuple[str, int] | None,
    http: tuple[str, int],
    state: Path | None,
    shadow: Path | None,
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

    Without CHECKPOINTS, only what a trainer's own processes publish (trainer_node.Publisher) goes out; with it, both do.
    """
    from p2pcast.daemon import (
        default_shadow,
        keep_freed_memory,
        keep_to_ourselves,
        name_fatal_signals,
        raise_descriptor_limit,
        state_home,
        until_told,
    )
    from p2pcast.transport.sockets import settled
    from trainer_node.hub import Hub
    from trainer_node.hub_config import HubConfig

    if commit != "barrier" and (barrier_timeout, barrier_quorum) != (None, None):
        raise UsageError("--barrier-timeout and --barrier-quorum need --commit barrier")
    if mirror_rate is not None and mirror is None:
        raise UsageError("--mirror-rate needs --mirror")
    folder = state or state_home() / "hub"
    config = HubConfig(
        checkpoints=checkpoints,
        state=folder,
        shadow=shadow or default_shadow(folder),
        base=base,
        listen=listen,
        advertise=advertise,
        http=http,
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
        sockets=settled(congestion),
        plaintext=plaintext,
        certificate_s=86400 * certificate_days,
        token_ttl_s=3600 * token_hours,
        recall_s=recall,
    )

    keep_to_ourselves()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        await until_told(Hub(config).run)

    event_loop.run(work())
