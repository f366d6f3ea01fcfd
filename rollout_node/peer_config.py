"""The settings of a peer: the options of `p2pcast join`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import click

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.cli import shared_settings as shared
from p2pcast.cli.options import Address, Stripes
from p2pcast.cli.settings import part, setting
from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.rollouts.kv_policy import KvPolicy, recomputes
from p2pcast.store.retention import AT_A_PEER, RetentionCounts
from p2pcast.transport.socket_options import Sockets
from p2pcast.trust.join_token import JoinToken

Driver = Literal["peer", "external"]
Role = Literal["lead", "member"]
SafePoint = Literal["step", "drain"]
Squashes = Literal["auto", "ask", "kept", "none"]

SERVERS = ("vllm", "sglang")
SPANS = "vllm:"
"""Prefix of the targets whose ranks may run on several hosts."""
TARGETS = "safetensors:DIR, vllm:URL, sglang:URL or exec:CMD"
_STATE = shared.state_of("peer", named=True)


class SafePointWait(NamedTuple):
    """``limit_s``: with the safe point ``drain``, the longest time that running requests get to finish."""

    safe_point: SafePoint
    limit_s: float


NO_WAIT: Final = SafePointWait("step", 600.0)


def valid_target(text: str) -> str:
    """Return ``text`` if it is a valid install target. Raises UsageError otherwise."""
    kind, colon, rest = text.partition(":")
    if kind not in ("safetensors", *SERVERS, "exec") or not colon or not rest:
        raise UsageError(f"{text!r} is not an install target: write {TARGETS}")
    return text


def _wait(commit_safe_point: SafePoint, drain_timeout_s: float) -> SafePointWait:
    return SafePointWait(commit_safe_point, drain_timeout_s)


def _no_mirror(given: Mapping[str, Any]) -> None:
    if given["hub"] is None:
        raise UsageError("no hub to join: give HUB, or the run's mirror with --from URL")


def _engine(engine: str | None, role: Role | None) -> tuple[str, Role] | None:
    if (engine is None) != (role is None):
        raise UsageError(
            "--engine NAME and --role lead or --role member go together: one engine, workers on several hosts"
        )
    if engine is None or role is None:
        return None
    if not 1 <= len(engine) <= limits.MAX_SPAN_NAME:
        raise UsageError(f"--engine: a name has 1 to {limits.MAX_SPAN_NAME} characters")
    return engine, role


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """``hub``: None if the run has only a mirror and no hub."""

    hub: tuple[str, int] | None = setting(None, argument=True, type=Address(None, 7077))
    mirror: str | None = setting(
        None,
        "The run's mirror, s3://BUCKET/PREFIX or file:///FOLDER; the source of versions when the hub is unreachable.",
        flag="from",
        metavar="URL",
        absent=_no_mirror,
    )
    token: JoinToken = part(
        shared.join_token,
        token_file=setting(None, "File with the join token that `p2pcast seed` wrote; or set P2PCAST_TOKEN."),
    )
    targets: tuple[str, ...] = setting(
        (),
        f"Install target for every version: {TARGETS}; repeatable.",
        flag="install",
        metavar="TARGET",
        reads=valid_target,
    )
    base: Path | None = setting(
        None, "Local Hugging Face folder with the run's version 0, so that the first join downloads only deltas."
    )
    quantise: str | None = setting(
        None,
        "Kind of quantised state that this peer's engines take, computed here from each version: a copy in memory "
        "beside the shadow.  [default: as published]",
        choices=list(KINDS),
    )
    state: Path = setting(text="Folder for this peer's keys and artifacts on disk.", absent=_STATE)
    shadow: Path = shared.shadow_of(_STATE)
    shadow_days: float = shared.shadow_days()
    listen: tuple[str, int] = setting(
        ":0", "Address on which this peer accepts other peers.", type=Address(""), show="any free port"
    )
    advertise: tuple[tuple[str, int], ...] = setting(
        (),
        "Address at which other peers reach this one, instead of the detected addresses; repeatable.",
        type=Address(),
    )
    http: tuple[str, int] = setting(
        "127.0.0.1:0", "Address of the HTTP server for status, metrics and commands.", type=Address("127.0.0.1")
    )
    http_per_address: int | None = shared.http_per_address()
    squashes: Squashes = setting(
        "auto",
        "Squashes (one delta in place of many) that a late peer may use. auto: the hub makes one where that saves "
        "time. ask: always. kept: only those that the hub already has. none: no squashes.",
    )
    region: str = setting(
        "",
        "Label of this site. Links inside a region count as short, and its peers share one WAN path. Without a label "
        "the peer counts as alone.",
        show=False,
    )
    name: str = shared.node_name(
        "Unique name of this node in status and for `p2pcast evict`.  [default: the host's name]"
    )
    stripes: int | None = setting(
        "auto",
        "TCP connections to the parent, 1 to 64; auto: chosen by round-trip time, rate and congestion control.",
        type=Stripes(),
    )
    sockets: Sockets = shared.sockets()
    kv: KvPolicy = setting(
        "recompute",
        "KV cache after a switch to new weights. recompute: recomputed; salt: kept for clients that send "
        "cache_salt=BRANCH.STEP; keep: kept as it is.",
    )
    wait: SafePointWait = part(
        _wait,
        NO_WAIT,
        commit_safe_point=setting(
            "step",
            "State in which a vLLM engine switches. step: between two steps, so that a running request goes on with "
            "the new weights. drain: after the running requests have ended, while new requests wait.",
        ),
        drain_timeout_s=setting(
            600.0,
            "Longest time in seconds for running requests to end, with --commit-safe-point drain.",
            above=0.0,
            high=86400.0,
        ),
    )
    counts: RetentionCounts = shared.retention(AT_A_PEER)
    keep: int = setting(3, "Number of versions kept in safetensors:DIR.", 1)
    folder_form: FolderForm = shared.step_folders("in safetensors:DIR")
    driver: Driver = setting(
        "peer",
        "Program that switches engines. peer: this daemon; external: your orchestrator, by POST /commit.",
    )
    rolling: int | None = setting(
        None, "Greatest number of engines that switch at the same time.  [default: all]", 1, metavar="K"
    )
    callbacks: Any = setting(
        None,
        "Python module or object with your before_commit(version) and after_commit(version, error).",
        type=click.STRING,
        metavar="PKG.MODULE[:OBJECT]",
    )
    """The object of that name, after `p2pcast join` has loaded the module."""
    max_defer_s: float = setting(
        10.0, "Longest time in seconds for which before_commit may defer a version.", 0.0, 3600.0
    )
    join_timeout_s: float = setting(
        60.0,
        "Time limit in seconds for the first join to reach the hub; 0: no limit. A later start needs no hub.",
        0.0,
    )
    max_age_s: float | None = setting(
        None,
        "Greatest age in seconds of the last word on the newest version, from hub, swarm or mirror; an older one makes "
        "the peer unready.  [default: no limit]",
        above=0.0,
    )
    engine: tuple[str, Role] | None = part(
        _engine,
        None,
        engine=setting(
            None,
            "Name of an engine whose workers run on several hosts; each host runs a peer.",
            metavar="NAME",
        ),
        role=setting(
            None,
            "This peer's role in --engine. lead: the one peer with --install vllm:URL; member: every other peer.",
        ),
    )
    plaintext: bool = shared.plaintext()

    def checked(self) -> PeerConfig:
        """Return the settings unchanged. Raises UsageError if they contradict each other."""
        if self.hub is None and self.engine is not None:
            raise UsageError("--engine needs HUB: members learn their lead's address from the hub")
        spans = sum(target.startswith(SPANS) for target in self.targets)
        role = None if self.engine is None else self.engine[1]
        if role == "lead" and spans != 1:
            raise UsageError(
                f"the lead of an engine drives its server: give exactly one --install vllm:URL, not {spans}"
            )
        if role == "member" and spans:
            raise UsageError(
                "a member serves the workers of its host, the lead drives the server: leave --install vllm:URL to the "
                "lead"
            )
        if role != "member" and not self.targets:
            raise UsageError(f"nothing to install into: give --install {TARGETS}")
        if self.wait.safe_point == "drain" and not recomputes(self.kv):
            raise UsageError(
                f"--kv {self.kv} keeps keys and values of old weights for later requests: --commit-safe-point drain "
                "needs --kv recompute"
            )
        if self.wait.safe_point == "drain" and self.driver == "external":
            raise UsageError(
                "--commit-safe-point drain is for --driver peer: with --driver external, your orchestrator pauses the "
                "engine, so let it pause with mode=wait"
            )
        if self.quantise is not None and self.engine is not None:
            raise UsageError(
                "--quantise is for engines on one host: leave out --engine, or publish with seed --quantise"
            )
        self.token.check_links(plaintext=self.plaintext)
        return self
