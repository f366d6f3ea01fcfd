"""The interface of installers.

Call ``start``; then, for each version, ``stage`` and ``commit``; finally ``close``. In between, call ``check`` and
``audit`` now and then. Make one call at a time. A staged version need not be committed: the next ``stage`` supersedes
it. Errors are p2pcast's own kinds. After an error, ``ready`` is False until a later ``commit`` succeeds, and
``committed`` is never a version that is only partly in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from p2pcast.codec.layout import Layout
from p2pcast.ground.version import Version

if TYPE_CHECKING:
    from pathlib import Path

Driver = Literal["peer", "external"]
"""The program that switches engines: this peer, or an orchestrator that pauses the engine around each commit."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """``pause_s``: seconds during which the engine generated nothing. ``recomputed_tokens``: upper bound on the tokens
    whose keys and values the switch makes the engine recompute; None if unknown. ``detail``: the installer's own
    figures, as JSON values. ``dense``: whether the whole state was written into a running engine, which is then
    audited.
    """

    pause_s: float
    recomputed_tokens: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """Digests of a target's own weights, computed in place and compared. ``wrong``: tensors that differ from
    ``version``'s; ``unknown``: tensors that cannot be compared; ``lacks``: adapters that the target does not load.
    """

    version: Version
    wrong: list[str]
    unknown: list[str]
    lacks: tuple[str, ...] = ()


class Pulse(Protocol):
    """A target's signs of life, apart from its answers to commands."""

    @property
    def beats(self) -> bool:
        """Whether the target's processes send signs of life."""

    async def fault(self) -> str | None:
        """Why the target is not ready for requests; None if all its processes are running. Called every second."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a target can do besides installs, as declared by its installer.

    - ``pulse``: signs of life of the target's processes; None if there are none.
    - ``serving_epoch``: id that changes with each write to the target's weights. None while weights may be written, and
      for a target whose switches do not wait for running requests.
    - ``follows_schedules``: whether the target's attention follows the budget schedule of its version.
    """

    pulse: Pulse | None = None
    serving_epoch: Callable[[], str | None] = lambda: None
    follows_schedules: Callable[[], bool] = lambda: False


class Installer(Protocol):
    """``committed``: the version in use; None if there is none or it is unknown. ``ready``: ready for requests."""

    name: str
    abilities: Abilities

    @property
    def committed(self) -> Version | None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def commit_needs_shadow(self) -> bool:
        """Whether the next ``commit`` reads the shadow. If so, the caller must hold it still at the staged version."""
        ...

    async def start(self) -> None:
        """Contact the target. Raises RetryableError while it does not answer."""
        ...

    async def check(self) -> None:
        """Check that the target still holds ``committed``. If not, set ``ready`` to False and ``committed`` to None.

        Cheap: called about once a second while the installer is idle. Raises RetryableError if the target is
        unreachable: then ``ready`` is False until a later ``check`` finds ``committed`` or a ``commit`` succeeds.
        """
        ...

    async def stage(self, version: Version, shadow: Path) -> None:
        """Prepare ``version``. ``shadow``, a safetensors file, holds exactly that version and is held still only until
        this returns. A target without a good version may be switched at once.
        """
        ...

    async def commit(self, version: Version) -> CommitReport:
        """Switch to the staged version. After an error, the old version is in use or ``ready`` is False."""
        ...

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        """Compare the target's own weights with the digests (docs/formats/delta-format.md, section 2) of ``committed``,
        by tensor number. The staged version may be lost and must then be staged again. If a tensor is wrong,
        ``committed`` becomes None and ``ready`` False, and the next ``stage`` and ``commit`` write the whole state.

        O(model). Raises LocalError if nothing is committed, RetryableError if the target is unreachable.
        """
        ...

    async def close(self) -> None: ...
