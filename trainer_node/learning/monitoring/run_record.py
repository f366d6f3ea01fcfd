"""Records of one training run, built from its events one after the other, for the screen, the plot and TensorBoard.

Guarantees: any JSON value can be added. Unknown events and keys are ignored, values of another type and numbers that
are not finite read as None, and an event without its required keys counts in ``unread``. Of a run that was resumed, the
lists hold the surviving lineage alone: a ``start`` event with step s supersedes every event beyond s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

ALARM_FACTOR: Final = 10.0
"""A probe's alarm: the KL exceeds this multiple of the floor that was measured at the start."""
MAX_TEXT: Final = 300
"""Most characters kept of one text; names of engines come from other machines."""

Number = float | None
Count = int | None


@dataclass(frozen=True, slots=True)
class StartEvent:
    """The learner started at ``step``: at the beginning of the run, or at a checkpoint."""

    step: int
    time: Number = None
    branch: Count = None
    epoch: Count = None
    model: str = ""
    parameters: Count = None
    ranks: Count = None


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One optimiser step; ``step`` counts it. Shares are 0..1, ``staleness`` counts rollouts by steps behind."""

    step: int
    time: Number = None
    branch: Count = None
    epoch: Count = None
    batch: str = ""
    groups: Count = None
    groups_played: Count = None
    rollouts: Count = None
    reward: Number = None
    tokens: Count = None
    learnt_tokens: Count = None
    truncated: Count = None
    skipped_updates: Count = None
    loss: Number = None
    grad_norm: Number = None
    lr: Number = None
    kl_sampler: Number = None
    kl_same_version: Number = None
    entropy: Number = None
    ratio_mean: Number = None
    ratio_max: Number = None
    over_cap_share: Number = None
    clip_share: Number = None
    effective_sample_share: Number = None
    sparse_share: Number = None
    kl_sparse: Number = None
    weight_sparse: Number = None
    weight_dense: Number = None
    judged_tokens: Count = None
    acceptance_mean: Number = None
    acceptance: Number = None
    kl_distill: Number = None
    acceptance_distill: Number = None
    replayed_share: Number = None
    replay_refused: Count = None
    kl_replayed: Number = None
    kl_own_routing: Number = None
    staleness: dict[int, int] = field(default_factory=dict)
    staleness_in_flight: Number = None
    staleness_in_queue: Number = None
    wait_s: Number = None
    train_s: Number = None
    bubble: Number = None

    @property
    def staleness_mean(self) -> Number:
        rollouts = sum(self.staleness.values())
        return sum(behind * count for behind, count in self.staleness.items()) / rollouts if rollouts else None

    @property
    def staleness_max(self) -> Count:
        return max((behind for behind, count in self.staleness.items() if count), default=None)

    @property
    def tokens_per_s(self) -> Number:
        """Tokens of the batch by the time from the end of the previous step to the end of this one."""
        took_s = (self.wait_s or 0.0) + (self.train_s or 0.0)
        return self.tokens / took_s if self.tokens is not None and took_s > 0 else None


@dataclass(frozen=True, slots=True)
class Publication:
    """One version that was published. ``live_s`` is None if too few engines were live in time."""

    version: Version
    step: int
    time: Number = None
    bytes: Count = None
    changed: Count = None
    elements: Count = None
    density: Number = None
    snapshot_s: Number = None
    durable_s: Number = None
    live_s: Number = None
    engines: Count = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Greedy answers of one version to held-out problems. ``tags``: counts by name and value."""

    step: int
    time: Number = None
    version: Version | None = None
    problems: Count = None
    answered: Count = None
    reward: Number = None
    seconds: Number = None
    tags: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """One engine's log-probabilities of the probe set against the learner's."""

    version: Version
    engine: str
    time: Number = None
    kl: Number = None
    floor: Number = None
    alarm: bool = False

    @property
    def step(self) -> int:
        return self.version.step


@dataclass(frozen=True, slots=True)
class BudgetEvent:
    """The guard of sparse attention gave bin ``bin`` of positions other pages. ``percentile``: the 5th, of ``tokens``
    acceptance rates. ``before``, ``after``: pages; None: all.
    """

    step: int
    bin: int
    time: Number = None
    percentile: Number = None
    tokens: Count = None
    before: Count = None
    after: Count = None


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    step: int
    time: Number = None
    digest: str = ""
    bytes: Count = None
    seconds: Number = None


@dataclass(frozen=True, slots=True)
class EndEvent:
    step: int
    time: Number = None
    seconds: Number = None
    reason: str = ""


Event = StartEvent | StepEvent | Publication | Evaluation | Probe | BudgetEvent | CheckpointEvent | EndEvent
_KINDS: Final[dict[str, tuple[type[Event], str]]] = {
    "start": (StartEvent, "starts"),
    "step": (StepEvent, "steps"),
    "publish": (Publication, "publications"),
    "evaluation": (Evaluation, "evaluations"),
    "probe": (Probe, "probes"),
    "budget": (BudgetEvent, "budgets"),
    "checkpoint": (CheckpointEvent, "checkpoints"),
    "end": (EndEvent, "end"),
}
"""For each event its type, and its place in a record."""


@dataclass(slots=True)
class RunRecord:
    """Events in the order in which the learner wrote them. Superseded events are in ``superseded`` alone."""

    starts: list[StartEvent] = field(default_factory=list)
    steps: list[StepEvent] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    budgets: list[BudgetEvent] = field(default_factory=list)
    checkpoints: list[CheckpointEvent] = field(default_factory=list)
    end: EndEvent | None = None
    """None while the run goes on, and after a crash."""
    superseded: list[Event] = field(default_factory=list)
    unread: int = 0
    """Number of lines that are no event, and of known events without their required keys."""

    @property
    def resumes(self) -> list[StartEvent]:
        """Every start but the first."""
        return self.starts[1:]

    @property
    def superseded_steps(self) -> list[StepEvent]:
        return [event for event in self.superseded if isinstance(event, StepEvent)]

    def add(self, document: object) -> Event | None:
        """Add one event. None: the document is no event that this release knows."""
        name = document.get("event") if isinstance(document, dict) else None
        if isinstance(name, str) and name not in _KINDS:
            return None
        event = _event(_KINDS[name][0], document) if isinstance(document, dict) and isinstance(name, str) else None
        if event is None or name is None:
            self.unread += 1
            return None
        if isinstance(event, StartEvent):
            self._supersede(event.step)
        if isinstance(event, EndEvent):
            self.end = event
        else:
            getattr(self, _KINDS[name][1]).append(event)
        return event

    def _supersede(self, step: int) -> None:
        """The learner goes on from ``step``: later events belong to a lineage that ended."""
        self.end = None
        for name in ("steps", "publications", "evaluations", "probes", "budgets", "checkpoints"):
            events: list[Event] = getattr(self, name)
            self.superseded += [event for event in events if event.step > step]
            setattr(self, name, [event for event in events if event.step <= step])


# -- values of a document


def _event(kind: type[Event], document: dict[str, Any]) -> Event | None:
    """None if a required key is missing or unreadable."""
    found: dict[str, Any] = {}
    for each in fields(kind):
        value = _READERS[str(each.type)](document.get(each.name))
        if value is not None:
            found[each.name] = value
        elif each.default is MISSING and each.default_factory is MISSING:
            return None
    return kind(**found)


def _number(value: object) -> Number:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _count(value: object) -> Count:
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _whole(value: object) -> Count:
    """A count that is not negative."""
    count = _count(value)
    return count if count is not None and count >= 0 else None


def _text(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    try:
        return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)[:MAX_TEXT])
    except ValueError:  # an integer with too many digits
        return None


def _version(value: object) -> Version | None:
    try:
        return Version.parse(value) if isinstance(value, str) else None
    except UsageError:
        return None


def _counts(value: object) -> dict[str, int]:
    items = value.items() if isinstance(value, dict) else ()
    return {_text(key) or "": count for key, found in items if (count := _whole(found)) is not None}


def _by_steps(value: object) -> dict[int, int]:
    # Four digits: a result is never as old as that, and the plot draws up to the oldest.
    return {int(key): count for key, count in _counts(value).items() if key.isdecimal() and len(key) <= 4}


def _tags(value: object) -> dict[str, dict[str, int]]:
    return {_text(name) or "": _counts(counts) for name, counts in (value.items() if isinstance(value, dict) else ())}


_READERS: Final[dict[str, Callable[[object], object]]] = {
    "int": _whole,
    "Count": _count,
    "Number": _number,
    "str": _text,
    "Version": _version,
    "Version | None": _version,
    "dict[int, int]": _by_steps,
    "dict[str, dict[str, int]]": _tags,
    "bool": lambda value: value is True,
}
