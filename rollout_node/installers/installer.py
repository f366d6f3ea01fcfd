"""The interface of installers.

The order is ``start``, then for each version ``stage`` and ``commit``, then ``close``; between them, now and then,
``check`` and ``audit``, one call at a time. A version may be staged and never committed: the next ``stage`` supersedes
it. Errors are p2pcast's own kinds; after one ``ready`` is False until a later ``commit`` succeeds, and ``committed`` is
never a version that isn't wholly in use.
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
    """``pause_s``: seconds in which the engine generated nothing. ``recomputed_tokens``: most tokens whose keys and
    values are recomputed because of the switch; None when unknown. ``detail``: the installer's own figures, fit for
    JSON. ``dense``: the whole state was written into a running engine, so the engine is audited before it is used.
    """

    pause_s: float
    recomputed_tokens: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    dense: bool = False


@dataclass(frozen=True, slots=True)
class Audit:
    """A target's own weights, digested where they lie. ``wrong``: names of the tensors that aren't those of
    ``version``; ``unknown``: of those that can't be told from here. ``lacks``: adapters that the target does not take.
    """

    version: Version
    wrong: list[str]
    unknown: list[str]
    lacks: tuple[str, ...] = ()


class Pulse(Protocol):
    """Signs of life of a target, apart from its answers to commands."""

    @property
    def beats(self) -> bool:
        """Whether the target's processes give signs of life."""

    async def fault(self) -> str | None:
        """Why the target is not fit for traffic; None: each of its processes runs. Called each second."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a target beyond installs, declared by its installer.

    - ``pulse``: signs of life of the target's processes; None: there are none.
    - ``serving_epoch``: id that changes with each write to the target's weights. None while weights may be written, and
      for a target whose switches do not wait for running requests.
    - ``follows_schedules``: whether the target's attention follows the schedule of budgets that belongs to its version.
    """

    pulse: Pulse | None = None
    serving_epoch: Callable[[], str | None] = lambda: None
    follows_schedules: Callable[[], bool] = lambda: False


class Installer(Protocol):
    """``committed``: the version in use, None when there is none or it isn't known. ``ready``: fit for traffic."""

    name: str
    abilities: Abilities

    @property
    def committed(self) -> Version | None: ...

    @property
    def ready(self) -> bool: ...

    @property
    def commit_needs_shadow(self) -> bool:
        """Whether the next ``commit`` reads the shadow: then the caller holds it still at the staged version."""
        ...

    async def start(self) -> None:
        """Contact the target. Raises RetryableError while it does not answer."""
        ...

    async def check(self) -> None:
        """Does the target still hold ``committed``? If not, ``ready`` is False and ``committed`` None afterwards.

        Cheap: it is called about once a second while nothing else is done. Raises RetryableError when the target is out
        of reach: then ``ready`` is False until a later ``check`` finds ``committed`` there, or a ``commit`` succeeds.
        """
        ...

    async def stage(self, version: Version, shadow: Path) -> None:
        """Make ``version`` ready. ``shadow``, a safetensors file, holds exactly that version and is held still until
        this returns, no longer. A target without a good version may be switched at once."""
        ...

    async def commit(self, version: Version) -> CommitReport:
        """Switch to the staged version. After an error the old version is in use, or ``ready`` is False."""
        ...

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        """Compare the target's own weights with the digests (docs/formats/delta-format.md, section 2) of ``committed``,
        by number of the tensor. The staged version may be lost: stage it again. When a tensor is wrong, ``committed``
        is None and ``ready`` False afterwards, and the next ``stage`` and ``commit`` write the whole state.

        O(model). Raises LocalError when nothing is committed, RetryableError when the target is out of reach.
        """
        ...

    async def close(self) -> None: ...
