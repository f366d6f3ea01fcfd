"""Facts that the measurements of ``p2pcast doctor`` have found, and findings about them. Pure.

None stands for an unknown value in every field that allows it; an unknown value is never judged fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

Role: TypeAlias = Literal["hub", "peer", "engine", "ledger", "learner"]
ROLES: tuple[Role, ...] = get_args(Role)
Outcome: TypeAlias = Literal["ok", "warn", "unfit", "unknown"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One sentence about one check. ``remedy``: the command line that corrects or examines the fault; empty for ok."""

    check: str
    outcome: Outcome
    roles: tuple[Role, ...]
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Volume:
    """The file system at ``path``. ``kind``: its type, as in ``tmpfs``. ``mode``: permission bits of ``path``."""

    path: str
    kind: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    mode: int | None = None
    writable: bool | None = None


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """``write_bps``: bytes per second, fsync included. ``sync_s``: median time of one fsync after a small write."""

    write_bps: float | None = None
    sync_s: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class StateFolder:
    """``exists`` is None where it cannot be told. ``parents_safe``: no other user may rename or redirect a parent.
    ``foreign``: entries that belong to other users.
    """

    path: str
    exists: bool | None = None
    is_link: bool = False
    owner: int | None = None
    mode: int | None = None
    parents_safe: bool | None = None
    foreign: int | None = None
    is_folder: bool = True


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a daemon listens on. ``option``: where a user sets another. ``fault``: empty if the port is free."""

    roles: tuple[Role, ...]
    option: str
    address: str
    number: int
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """``packages``: installed version by module name, ``""`` for an unknown version; missing modules are absent.
    ``held_shadow_bytes``: tmpfs that the shadow of this state folder takes already. ``user``: id of this process's.
    """

    python: tuple[int, ...] = ()
    system: str = ""
    user: int | None = None
    packages: Mapping[str, str] | None = None
    gpus: tuple[str, ...] | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    container_limit_bytes: int | None = None
    shm: Volume | None = None
    held_shadow_bytes: int = 0
    state: StateFolder | None = None
    disk: Volume | None = None
    speed: DiskSpeed | None = None
    descriptors: int | None = None
    clock_synchronized: bool | None = None
    ports: tuple[Port, ...] = ()
    ipv6: bool | None = None
    congestion_available: tuple[str, ...] | None = None
    bbr_usable: bool | None = None
    congestion_default: str = ""
    window_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFacts:
    """A hub as seen from here, without joining. ``connects_s``: time of each successful TCP connect in seconds.

    ``tls``: whether a TLS handshake succeeded; None: not tried. ``role``, ``run``: from the certificate shown, whose
    signature is not verified. ``in_force``: whether this machine's clock lies in the certificate's validity.
    ``clock_offset_s``: the hub's clock minus this machine's; ``clock_error_s``: greatest error of that figure.
    """

    address: str
    attempts: int = 0
    connects_s: tuple[float, ...] = field(default=())
    fault: str = ""
    plaintext: bool = False
    tls: bool | None = None
    tls_fault: str = ""
    role: str = ""
    run: str = ""
    in_force: bool | None = None
    token_run: str = ""
    token_encrypts: bool | None = None
    http: str = ""
    http_fault: str = ""
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """The path to another machine, measured with a doctor there. ``there``, ``back``: rates of data sent from here and
    to here, in bits per second. ``…_loss``: share of the bytes that were sent again.
    """

    address: str
    fault: str = ""
    rtt_s: float | None = None
    there_bps: float | None = None
    there_loss: float | None = None
    back_bps: float | None = None
    back_loss: float | None = None
