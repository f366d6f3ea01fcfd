"""``p2pcast join``: run a peer."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, MarkerStyle, StepNames
from p2pcast.cli.options import (
    PATH,
    Address,
    Stripes,
    congestion,
    http_per_address,
    plaintext,
    read_token,
    retention,
    seconds,
    shadow_days,
    step_folders,
)
from p2pcast.ground.errors import UsageError
from p2pcast.process import event_loop
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.rollouts.kv_policy import KV_POLICIES, KvPolicy
from p2pcast.store.retention import AT_A_PEER
from p2pcast.trust.node_names import default_name, name_fault

if TYPE_CHECKING:
    from rollout_node.sync.catchup_choice import Squashes


@click.command()
@click.argument("hub", type=Address(None, 7077), required=False, envvar="P2PCAST_JOIN_HUB")
@click.option(
    "--from",
    "mirror",
    envvar="P2PCAST_JOIN_FROM",
    metavar="URL",
    help="The run's mirror, s3://BUCKET/PREFIX or file:///FOLDER; the source of versions when the hub is unreachable.",
)
@click.option(
    "--token-file", type=PATH, help="File with the join token that `p2pcast seed` wrote; or set P2PCAST_TOKEN."
)
@click.option(
    "--install",
    "targets",
    envvar="P2PCAST_JOIN_INSTALL",
    multiple=True,
    metavar="TARGET",
    help="Install target for every version: safetensors:DIR, vllm:URL, sglang:URL or exec:CMD; repeatable.",
)
@click.option(
    "--base",
    type=PATH,
    help="Local Hugging Face folder with the run's version 0, so that the first join downloads only deltas.",
)
@click.option(
    "--quantise",
    type=click.Choice(list(KINDS)),
    help=(
        "Kind of quantised state that this peer's engines take, computed here from each version: a copy in memory "
        "beside the shadow.  [default: as published]"
    ),
)
@click.option("--state", type=PATH, help="Folder for this peer's keys and artifacts on disk.")
@click.option("--shadow", type=PATH, help="Folder in tmpfs for the current weights in memory (the size of the model).")
@shadow_days
@click.option(
    "--listen",
    type=Address(""),
    default=":0",
    show_default="any free port",
    help="Address on which this peer accepts other peers.",
)
@click.option(
    "--advertise",
    type=Address(),
    multiple=True,
    help="Address at which other peers reach this one, instead of the detected addresses; repeatable.",
)
@click.option(
    "--http",
    type=Address("127.0.0.1"),
    default="127.0.0.1:0",
    help="Address of the HTTP server for status, metrics and commands.",
)
@http_per_address
@click.option(
    "--squashes",
    type=click.Choice(["auto", "ask", "kept", "none"]),
    default="auto",
    help=(
        "Squashes (one delta in place of many) that a late peer may use. auto: the hub makes one where that saves "
        "time. ask: always. kept: only those that the hub already has. none: no squashes."
    ),
)
@click.option(
    "--region",
    default="",
    show_default=False,
    help=(
        "Label of this site. Links inside a region count as short, and its peers share one WAN path. Without a label "
        "the peer counts as alone."
    ),
)
@click.option("--name", help="Unique name of this node in status and for `p2pcast evict`.  [default: the host's name]")
@click.option(
    "--stripes",
    type=Stripes(),
    default="auto",
    help="TCP connections to the parent, 1 to 64; auto: chosen by round-trip time, rate and congestion control.",
)
@congestion
@click.option(
    "--kv",
    type=click.Choice(KV_POLICIES),
    default="recompute",
    help=(
        "KV cache after a switch to new weights. recompute: recomputed; salt: kept for clients that send "
        "cache_salt=BRANCH.STEP; keep: kept as it is."
    ),
)
@click.option(
    "--commit-safe-point",
    type=click.Choice(["step", "drain"]),
    default="step",
    help=(
        "State in which a vLLM engine switches. step: between two steps, so that a running request goes on with the "
        "new weights. drain: after the running requests have ended, while new requests wait."
    ),
)
@seconds(
    "join",
    "drain-timeout",
    click.FloatRange(0.0, 86400.0, min_open=True),
    600.0,
    "Longest time in seconds for running requests to end, with --commit-safe-point drain.",
)
@retention
@click.option("--keep", type=click.IntRange(1), default=3, help="Number of versions kept in safetensors:DIR.")
@step_folders("in safetensors:DIR")
@click.option(
    "--driver",
    type=click.Choice(["peer", "external"]),
    default="peer",
    help="Program that switches engines. peer: this daemon; external: your orchestrator, by POST /commit.",
)
@click.option(
    "--rolling",
    type=click.IntRange(1),
    metavar="K",
    help="Greatest number of engines that switch at the same time.  [default: all]",
)
@click.option(
    "--callbacks",
    metavar="PKG.MODULE[:OBJECT]",
    help="Python module or object with your before_commit(version) and after_commit(version, error).",
)
@seconds(
    "join",
    "max-defer",
    click.FloatRange(0.0, 3600.0),
    10.0,
    "Longest time in seconds for which before_commit may defer a version.",
)
@seconds(
    "join",
    "join-timeout",
    click.FloatRange(0.0),
    60.0,
    "Time limit in seconds for the first join to reach the hub; 0: no limit. A later start needs no hub.",
)
@seconds(
    "join",
    "max-age",
    click.FloatRange(0.0, min_open=True),
    None,
    (
        "Greatest age in seconds of the last word on the newest version, from hub, swarm or mirror; an older one makes "
        "the peer unready.  [default: no limit]"
    ),
)
@click.option(
    "--engine", metavar="NAME", help="Name of an engine whose workers run on several hosts; each host runs a peer."
)
@click.option(
    "--role",
    type=click.Choice(["lead", "member"]),
    help="This peer's role in --engine. lead: the one peer with --install vllm:URL; member: every other peer.",
)
@plaintext
def join(
    hub: tuple[str, int] | None,
    squashes: Squashes,
    mirror: str | None,
    token_file: Path | None,
    targets: tuple[str, ...],
    base: Path | None,
    quantise: str | None,
    state: Path | None,
    shadow: Path | None,
    shadow_days: float,
    listen: tuple[str, int],
    advertise: tuple[tuple[str, int], ...],
    http: tuple[str, int],
    http_per_address: int | None,
    region: str,
    name: str | None,
    stripes: int | None,
    congestion: str | None,
    kv: KvPolicy,
    commit_safe_point: Literal["step", "drain"],
    drain_timeout_s: float,
    keep_deltas: int | None,
    keep_anchors: int | None,
    keep: int,
    step_names: StepNames,
    step_marker: MarkerStyle,
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
    """Receive every version of the run at HUB, relay it to other peers, and install it. Without HUB, read versions from
    the run's mirror (--from) alone.

    \b
    Examples:
      p2pcast join hub.example:7077 --token-file token --install vllm:http://127.0.0.1:8000
      p2pcast join hub.example:7077 --base Qwen3-4B --install safetensors:/models/latest --keep 2
      p2pcast join --from s3://bucket/run --install exec:./reload.sh
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
    from p2pcast.trust.join_token import JoinToken
    from rollout_node.engine.callbacks import load
    from rollout_node.engine.install_target import Wait, check, check_span, check_wait
    from rollout_node.peer_config import PeerConfig
    from rollout_node.peer_daemon import PeerDaemon

    if hub is None and mirror is None:
        raise UsageError("no hub to join: give HUB, or the run's mirror with --from URL")
    if hub is None and engine is not None:
        raise UsageError("--engine needs HUB: members learn their lead's address from the hub")
    for target in targets:
        check(target)
    check_span(targets, engine, role)
    check_wait(commit_safe_point, kv, driver)
    if quantise is not None and engine is not None:
        raise UsageError("--quantise is for engines on one host: leave out --engine, or publish with seed --quantise")
    host = socket.gethostname()
    if name is not None and (fault := name_fault(name)) is not None:
        raise UsageError(fault)
    named = default_name(host) if name is None else name
    folder = state or state_home() / f"peer-{name or host}"
    token = JoinToken.parse(read_token(token_file))
    token.check_links(plaintext=plaintext)
    config = PeerConfig(
        hub=hub,
        squashes=squashes,
        mirror=mirror,
        token=token,
        targets=targets,
        state=folder,
        shadow=shadow or default_shadow(folder),
        shadow_days=shadow_days,
        name=named,
        base=base,
        quantise=quantise,
        region=region,
        listen=listen,
        advertise=advertise,
        http=http,
        http_per_address=http_per_address,
        stripes=stripes,
        sockets=choose_sockets(congestion),
        kv=kv,
        wait=Wait(commit_safe_point, drain_timeout_s),
        keep=keep,
        folder_form=FolderForm(step_names, MARKERS[step_marker]),
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

    restrict_umask()
    keep_freed_memory()
    raise_descriptor_limit()
    name_fatal_signals()

    async def work() -> None:
        daemon = PeerDaemon(config)
        await run_until_signal(daemon.run, daemon.drain)

    event_loop.run(work())
