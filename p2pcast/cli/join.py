"""``p2pcast join``: a peer."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from p2pcast import event_loop
from p2pcast.cli.options import PATH, Address, Stripes, congestion, plaintext, read_token, retention, seconds
from p2pcast.errors import UsageError
from p2pcast.store.retention import AT_A_PEER
from p2pcast.trust.names import default_name, name_fault

if TYPE_CHECKING:
    from rollout_node.catching_up import Squashes


@click.command()
@click.argument("hub", type=Address(None, 7077), required=False, envvar="P2PCAST_JOIN_HUB")
@click.option(
    "--from",
    "mirror",
    envvar="P2PCAST_JOIN_FROM",
    metavar="URL",
    help="The run's mirror, s3://BUCKET/PREFIX or file:///FOLDER: where no hub is in reach.",
)
@click.option("--token-file", type=PATH, help="The join token, as `p2pcast seed` wrote it; or P2PCAST_TOKEN.")
@click.option(
    "--install",
    "targets",
    envvar="P2PCAST_JOIN_INSTALL",
    multiple=True,
    metavar="TARGET",
    help="safetensors:DIR, vllm:URL or exec:CMD; repeatable.",
)
@click.option("--base", type=PATH, help="Hugging Face folder that the run began from: then nothing is downloaded at first.")
@click.option("--state", type=PATH, help="Folder for what this peer keeps on disk.")
@click.option("--shadow", type=PATH, help="Folder in tmpfs for the state in memory (1 x the model).")
@click.option("--listen", type=Address(""), default=":0", show_default="any free port", help="Where other peers reach this one.")
@click.option("--advertise", type=Address(), multiple=True, help="Address that other peers are told, and no other; repeatable.")
@click.option("--http", type=Address("127.0.0.1"), default="127.0.0.1:0", show_default=True, help="Status and metrics.")
@click.option(
    "--squashes",
    type=click.Choice(["auto", "ask", "kept", "none"]),
    default="auto",
    show_default=True,
    help="When late: ask the hub for one delta in place of many where that saves time, or always; take those that it keeps; none.",
)
@click.option(
    "--region",
    default="",
    help="Label of the site; links inside one are taken to be short, the way there to be shared; without it, none is.",
)
@click.option("--name", help="Name in status and for `p2pcast evict`, different for each node.  [default: the host's]")
@click.option(
    "--stripes",
    type=Stripes(),
    default="auto",
    show_default=True,
    help="TCP connections to the parent, 1 to 64. auto: by round trip, rate and congestion control.",
)
@congestion
@click.option(
    "--kv",
    type=click.Choice(["recompute", "salt", "keep"]),
    default="recompute",
    show_default=True,
    help="Keys and values of older weights: computed anew, kept for clients that send cache_salt=BRANCH.STEP, or kept.",
)
@retention
@click.option("--keep", type=click.IntRange(1), default=3, show_default=True, help="Versions that safetensors:DIR keeps.")
@click.option(
    "--driver",
    type=click.Choice(["peer", "external"]),
    default="peer",
    show_default=True,
    help="Who switches engines: this peer, or an orchestrator of your own that calls POST /commit.",
)
@click.option("--rolling", type=click.IntRange(1), metavar="K", help="At most K engines are being switched at one time.")
@click.option("--callbacks", metavar="PKG.MODULE[:OBJECT]", help="Your before_commit(version) and after_commit(version, error).")
@seconds(
    "join",
    "max-defer",
    click.FloatRange(0.0, 3600.0),
    10.0,
    "So long may before_commit put off a version.",
)
@seconds(
    "join",
    "join-timeout",
    click.FloatRange(0.0),
    60.0,
    "Time for the first join to reach the hub; 0: no limit. A peer that has joined before needs no hub to start.",
)
@seconds(
    "join",
    "max-age",
    click.FloatRange(0.0, min_open=True),
    None,
    "Greatest age of the last news of the newest version, from hub, swarm or mirror; beyond it the peer is unready.  [default: no limit]",
)
@click.option("--engine", metavar="NAME", help="An engine whose workers run on several hosts, each with a peer.")
@click.option(
    "--role", type=click.Choice(["lead", "member"]), help="In --engine: the one peer with --install vllm:URL, or another."
)
@plaintext
def join(
    hub: tuple[str, int] | None,
    squashes: Squashes,
    mirror: str | None,
    token_file: Path | None,
    targets: tuple[str, ...],
    base: Path | None,
    state: Path | None,
    shadow: Path | None,
    listen: tuple[str, int],
    advertise: tuple[tuple[str, int], ...],
    http: tuple[str, int],
    region: str,
    name: str | None,
    stripes: int | None,
    congestion: str | None,
    kv: Literal["recompute", "salt", "keep"],
    keep_deltas: int | None,
    keep_anchors: int | None,
    keep: int,
    driver: Literal["peer", "external"],
    rolling: int | None,
    callbacks: str | None,
    max_defer_s: float,
    join_timeout_s: float,
    max_age_s: float | None,
    engine: str | None,
    role: Literal["lead", "member"] | None,
    plaintext: bool,
) -> None:
    """Receive every version from the run at HUB, pass it on, and install it. Without HUB, follow the run's mirror (--from) alone."""
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
    from p2pcast.wire.token import Token
    from rollout_node.callbacks import load
    from rollout_node.peer import Peer
    from rollout_node.peer_config import PeerConfig
    from rollout_node.targets import check, check_span

    if hub is None and mirror is None:
        raise UsageError("a HUB to join is needed, or the run's mirror: --from URL")
    if hub is None and engine is not None:
        raise UsageError("--engine needs a HUB: it is the hub that tells members where their lead is")
    for target in targets:
        check(target)
    check_span(targets, engine, role)
    host = socket.gethostname()
    if name is not None and (fault := name_fault(name)) is not None:
        raise UsageError(fault)
    named = default_name(host) if name is None else name
    folder = state or state_home() / f"peer-{name or host}"
    token = Token.parse(read_token(token_file))
    token.check_links(plaintext=plaintext)
    config = PeerConfig(
        hub=hub,
        squashes=squashes,
        mirror=mirror,
        token=token,
        targets=targets,
        state=folder,
        shadow=shadow or default_shadow(folder),
        name=named,
        base=base,
        region=region,
        listen=listen,
        advertise=advertise,
        http=http,
        stripes=stripes,
        sockets=settled(congestion),
        kv=kv,
        keep=keep,
        counts=replace(AT_A_PEER, deltas=keep_deltas, anchors=keep_anchors),
        driver=driver,
        rolling=rolling,
        callbacks=None if callbacks is None else load(callbacks, Path.cwd()),
        max_defer_s=max_defer_s,
        join_timeout_s=join_timeout_s,
        max_age_s=max_age_s,
        engine=None if engine is None or role is None else (engine, role),
        plaintext=plaintext,
    )

    keep_to_ourselves()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        peer = Peer(config)
        await until_told(peer.run, peer.drain)

    event_loop.run(work())
