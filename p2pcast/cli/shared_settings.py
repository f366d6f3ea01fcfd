"""Settings that several records share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm, MarkerStyle, StepNames
from p2pcast.cli.options import TOKEN_VARIABLE, StepNamesType, read_token, task_names
from p2pcast.cli.settings import part, setting
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_KEPT, MIB, MIN_ADDRESS_CONNECTIONS, SHADOW_KEPT_DAYS
from p2pcast.process.daemon_process import default_shadow, state_home
from p2pcast.store.retention import KEEP_ANCHORS, KEEP_DELTAS, RetentionCounts
from p2pcast.transport.socket_options import Sockets, choose_sockets
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.node_names import default_name, name_fault

Folder = Callable[[Mapping[str, Any]], Path]


def state_of(role: str, *, named: bool = False) -> Folder:
    """Return a function that gives the state folder. ``named``: the default folder depends on the node's name."""

    def folder(given: Mapping[str, Any]) -> Path:
        name = f"-{given['name'] or socket.gethostname()}" if named else ""
        return Path(given["state"] or state_home() / f"{role}{name}")

    return folder


def shadow_of(state: Folder) -> Any:
    """``--shadow DIR``."""
    return setting(
        text="Folder in tmpfs for the current weights in memory (the size of the model).",
        absent=lambda given: default_shadow(state(given)),
    )


def shadow_days() -> Any:
    """``--shadow-days DAYS``."""
    return setting(
        SHADOW_KEPT_DAYS,
        "Days for which shadows in /dev/shm stay that no daemon uses; removed at this start; inf: always kept.",
        0,
        metavar="DAYS",
    )


def http_per_address() -> Any:
    """``--http-per-address COUNT``."""
    return setting(
        None,
        "Open HTTP connections of one address, or of one /64 of IPv6.  [default: half of all, at least "
        f"{MIN_ADDRESS_CONNECTIONS}]",
        1,
        metavar="COUNT",
    )


def step_folders(where: str) -> Any:
    """``--step-names PATTERN`` and ``--step-marker STYLE`` for the folders described by ``where``."""
    return part(
        _folder_form,
        FolderForm(),
        step_names=setting(
            str(StepNames()),
            f"Names of the step folders {where}, such as weight_v{{step:06}}: 6 digits or more.",
            type=StepNamesType(),
        ),
        step_marker=setting(
            "STABLE",
            f"Files that say that a step folder {where} is complete. STABLE: this file; prime-rl: .finished and "
            "the markers before it; none: no file.",
        ),
    )


def _folder_form(step_names: StepNames, step_marker: MarkerStyle) -> FolderForm:
    return FolderForm(step_names, MARKERS[step_marker])


def retention(counts: RetentionCounts) -> Any:
    """``--keep-deltas`` and ``--keep-anchors``. ``counts``: the defaults."""

    def make(keep_deltas: int | None, keep_anchors: int | None) -> RetentionCounts:
        return RetentionCounts(keep_deltas, keep_anchors, counts.chain)

    return part(
        make,
        counts,
        keep_deltas=setting(
            None,
            f"Deltas kept on disk: the newest N, and all that the newest version needs.  [default: {KEEP_DELTAS}]",
            1,
            MAX_KEPT,
            metavar="N",
        ),
        keep_anchors=setting(
            None,
            "Anchors (whole states) kept on disk: the newest N, and the bases of kept deltas.  [default: "
            f"{KEEP_ANCHORS}]",
            1,
            MAX_KEPT,
            metavar="N",
        ),
    )


def sockets() -> Any:
    """``--congestion NAME``."""
    return part(
        choose_sockets,
        Sockets(),
        congestion=setting(
            None,
            "TCP congestion control for the data that this daemon sends.  [default: bbr where the kernel has it, "
            "otherwise the kernel's default]",
            metavar="NAME",
        ),
    )


def plaintext() -> Any:
    """``--plaintext``: links without TLS; links use TLS by default."""
    return setting(
        False,
        "Links without encryption, for loopback and closed networks: the network can read the weights. Joining still "
        "takes the token, shared by all nodes, and weights are still signed.",
    )


def node_name(text: str) -> Any:
    """``--name``; by default, the host's name."""
    return setting(text=text, reads=valid_name, absent=lambda _: default_name(socket.gethostname()))


def valid_name(name: str) -> str:
    if (fault := name_fault(name)) is not None:
        raise UsageError(fault)
    return name


def join_token(token_file: Path | None) -> JoinToken:
    """Read the token from ``--token-file`` or the environment. Raises UsageError."""
    return JoinToken.parse(read_token(token_file))


def token_of_node(hub: tuple[str, int] | None, token_file: Path | None) -> JoinToken | None:
    """Read the token with which a ledger or worker requests a certificate from its hub. None if there is no hub, or no
    token, which is needed only for the first start. Raises UsageError.
    """
    given = token_file is not None or TOKEN_VARIABLE in os.environ
    return join_token(token_file) if hub is not None and given else None


def task_name() -> Any:
    """``--task``."""
    return setting(
        text="Task to play, with settings: NAME,KEY=VALUE. NAME: built in, of a plug-in, or PKG.MODULE:CLASS.",
        metavar="NAME",
        complete=task_names,
    )


class Checks(NamedTuple):
    """How the processes that compute rewards run. ``check_s``: time limit for checking one reward."""

    check_s: float
    processes: int
    memory_bytes: int


def reward_checks() -> Any:
    """``--check``, ``--checks``, ``--check-memory``."""
    return part(
        _checks,
        check_s=setting(10.0, "Time limit in seconds of one reward's check.", 0.1, 3600.0),
        checks=setting(1, "Number of processes for the checks of rewards.", 1, 64),
        check_memory=setting(2048, "Memory limit of one check's process in MiB.", 64, metavar="MIB", unit=MIB),
    )


def _checks(check_s: float, checks: int, check_memory: int) -> Checks:
    return Checks(check_s, checks, check_memory)
