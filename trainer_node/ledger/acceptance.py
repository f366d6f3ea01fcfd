"""Whether a result is accepted. Pure.

Two rules:

- ``strict`` (SparrowRL, section 5.4): the result came within its lease. The version that the job names made all of it,
  with the hash of that version's signed manifest.
- ``bounded`` (ECHO-2): each span's version is live and its manifest's hash is right. The oldest span is at most S steps
  behind the learner. A result that comes after its lease counts if it is the first of its job.

Guarantees: an accepted result has no fault, and its job had no accepted result before. Only results that no honest
worker sends are held against a worker: malformed and forged ones, never stale, late or duplicate ones. A few results of
versions that the hub never published are forgiven (``trainer_node.ledger.result_transitions``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, fault
from p2pcast.rollouts.routed_experts import ExpertShape, shape_fault
from trainer_node.ledger.lineage import Lineage

Rule = Literal["strict", "bounded"]


class Reason(Enum):
    MALFORMED = "malformed"
    FORGED = "forged"
    UNKNOWN = "unknown version"
    UNVERSIONED = "no version"
    """Of an engine into which no peer had installed a version."""
    DUPLICATE = "duplicate"
    LATE = "late"
    STALE = "stale"
    DEAD = "dead version"
    """Of a branch that the learner has left."""
    DAMAGED = "damaged"
    """Accepted before; its bytes at the ledger cannot be read any more."""
    UNSCORED = "not scored"
    """The task's check hung, crashed or raised at the ledger."""
    DISTRUSTED = "untrusted worker"
    """Accepted before, with the worker's own reward; another reward of the worker was wrong."""

    @property
    def blames(self) -> bool:
        """Whether the rejection counts against the worker."""
        return self in (Reason.MALFORMED, Reason.FORGED)


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Standards:
    """``staleness``: S, in learner steps. ``vocabulary``: number of token ids. ``manifests``: of each known version,
    the hash of its signed manifest. ``schedules``: of each known version that carries a schedule of sparse attention,
    its name. ``experts``: of the run's model; None: only the form of routed experts is checked.
    """

    rule: Rule
    staleness: int
    vocabulary: int
    learner_step: int
    lineage: Lineage
    manifests: Mapping[Version, bytes]
    schedules: Mapping[Version, bytes] = field(default_factory=dict)
    experts: ExpertShape | None = None


def rejection(
    result: Result,
    job: Job,
    standards: Standards,
    *,
    settled: bool,
    in_time: bool,
    served: Version | None = None,
) -> Rejection | None:
    """Return why the result is rejected, or None. ``settled``: whether the job has ended. ``in_time``: whether the
    lease was in force when the result arrived. ``served``: by the engine when the lease began; None if unknown.
    """
    wrong = _forgery(result, job) or _manifest_fault(result, standards) or _schedule_fault(result, standards)
    if wrong is not None:
        return wrong
    if (detail := fault(result, standards.vocabulary)) and (result.spans or not result.sampled):
        return Rejection(Reason.MALFORMED, detail)
    routed, shape = result.routed_experts, standards.experts
    if routed is not None and shape is not None and (detail := shape_fault(routed, shape)):
        return Rejection(Reason.MALFORMED, detail)
    if settled:
        return Rejection(Reason.DUPLICATE, "the job has ended")
    versions = {span.version for span in result.spans}
    wanted = job.oldest if job.pinned is None else job.pinned
    late = version_rejection(versions, job.purpose, wanted, standards, in_time=in_time)
    return late or _step_back(versions, served)


def version_rejection(
    versions: Collection[Version], purpose: str, wanted: Version, standards: Standards, *, in_time: bool
) -> Rejection | None:
    """Check only the versions and the time, as part of ``rejection``. ``versions``: those of the result's spans.
    ``wanted``: the version that the job names.
    """
    if not versions:
        return Rejection(Reason.UNVERSIONED, "no version is named: the engine answered before its first install")
    if unknown := sorted(v for v in versions if v not in standards.manifests):
        return Rejection(Reason.UNKNOWN, f"no version {unknown[0]} is known")
    if purpose == "evaluate" or standards.rule == "strict":
        if any(version != wanted for version in versions):
            return Rejection(Reason.STALE, f"made by {_named(versions)}, and {wanted} was asked for")
        if standards.rule == "strict" and not in_time:
            return Rejection(Reason.LATE, "the lease had expired")
    if purpose == "evaluate":
        return None
    if dead := sorted(v for v in versions if not standards.lineage.is_live(v)):
        return Rejection(Reason.DEAD, f"the learner's weights do not descend from version {dead[0]}")
    behind = standards.learner_step - min(version.step for version in versions)
    if behind > standards.staleness:
        return Rejection(Reason.STALE, f"{behind} steps behind the learner, and {standards.staleness} are allowed")
    return None


def _forgery(result: Result, job: Job) -> Rejection | None:
    if result.task_hash != job.task_hash:
        return Rejection(Reason.FORGED, f"played by another task than the job's {job.task}")
    if result.temperature != job.temperature:
        return Rejection(Reason.FORGED, f"sampled at temperature {result.temperature}, not {job.temperature}")
    return None


def _manifest_fault(result: Result, standards: Standards) -> Rejection | None:
    for span in result.spans:
        known = standards.manifests.get(span.version)
        if known is not None and known != span.manifest:
            return Rejection(Reason.FORGED, f"version {span.version} has another manifest")
    return None


def _schedule_fault(result: Result, standards: Standards) -> Rejection | None:
    """Audits exclude results of sparse attention, so no worker may claim a schedule that its version does not carry. A
    false claim is forged: peers take a schedule's name from the same signed manifest as the hub.
    """
    for version, name in result.schedules or ():
        if version in standards.manifests and standards.schedules.get(version) != name:
            return Rejection(Reason.FORGED, f"version {version} carries no schedule {name.hex()[:12]}")
    return None


def _step_back(versions: Collection[Version], served: Version | None) -> Rejection | None:
    """If a switch fails, the ranks roll back and the engine serves its previous version. So a span older than the
    version at the start of the lease may be genuine and is not held against the worker. The result is still rejected:
    otherwise workers could name old versions to have results accepted, or groups dropped.
    """
    for version in versions if served is not None else ():
        if served is not None and version.branch == served.branch and version.step < served.step:
            return Rejection(Reason.STALE, f"sampled by {version}, after the engine had served {served}")
    return None


def _named(versions: Collection[Version]) -> str:
    return "no version" if not versions else ", ".join(map(str, sorted(versions)))
