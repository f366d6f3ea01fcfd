"""Requests of trainers and fleet operators to the ledger, and its responses (docs/reference/http.md). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from p2pcast.ledger_api.api_route import (
    MAX_LIST,
    ApiRecord,
    ApiRequest,
    ApiRoute,
    BinaryId,
    DrainSeconds,
    HexHash,
    HexId,
    Name,
    Nothing,
    PackedRequest,
    Seconds,
    TokenSequences,
    VersionText,
)
from p2pcast.rollouts.overlong import MAX_TREATMENT
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, SCORE_BYTES
from p2pcast.rollouts.rollout_fields import MAX_GROUP

MAX_BATCHES: Final = 4096
"""Most batches between two checkpoints."""
MAX_BATCH_GROUPS: Final = 1 << 20
MAX_READ: Final = 1024
"""Most groups that are read in one request."""
MAX_VERDICTS: Final = 1024
"""Most verdicts on probes in one request, and scores in one response."""
MAX_KL: Final = 1e12
MAX_GAP: Final = 1e9

Step: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 62)]
Branch: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 31)]
BatchIds: TypeAlias = Annotated[Sequence[HexId], Meta(max_length=MAX_BATCHES)]
Gap: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_GAP)]
Divergence: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_KL)]


class GroupsRequest(PackedRequest, frozen=True):
    """``groups``: the encoded records."""

    groups: Annotated[Sequence[bytes], Meta(max_length=MAX_LIST)]


class GroupsAnswer(ApiRecord, frozen=True):
    added: int


class ReadGroupsRequest(ApiRecord, frozen=True):
    groups: Annotated[Sequence[HexId], Meta(max_length=MAX_READ)]


class GroupRow(ApiRecord, frozen=True):
    group: HexId
    state: str
    reason: str | None
    rewards: Sequence[float]


class ReadGroupsAnswer(ApiRecord, frozen=True):
    groups: Sequence[GroupRow]


class PublishRequest(ApiRequest, frozen=True):
    version: VersionText
    manifest: HexHash
    schedule: HexHash | None = None


class ResumeRequest(ApiRecord, frozen=True):
    branch: Branch
    step: Step
    batches: BatchIds
    checkpoint: HexHash | None = None
    from_start: bool | None = None


class ResumeAnswer(ApiRecord, frozen=True):
    epoch: int


class TakeRequest(ApiRequest, frozen=True):
    epoch: Step
    branch: Branch
    step: Step
    overlong: Annotated[str, Meta(max_length=MAX_TREATMENT)] | None = None


class BatchReport(ApiRecord, frozen=True):
    """``groups_played`` and ``mean_reward`` include groups without a gradient."""

    groups_played: int
    mean_reward: float | None


class BatchResult(ApiRecord, frozen=True):
    """``result``: the encoded record. ``worker``: its name. ``settled_step``: the learner's when the result came."""

    result: bytes
    reward: float
    worker: str
    settled_step: int


class BatchGroup(ApiRecord, frozen=True):
    """``group``: the encoded record."""

    group: bytes
    results: Annotated[Sequence[BatchResult], Meta(max_length=MAX_GROUP)]


class TakeAnswer(ApiRecord, frozen=True):
    """A batch, or ``wait``, the delay in seconds before the next request, or ``finished``: the run is over. ``step``
    and ``groups`` belong to a batch.
    """

    report: BatchReport
    batch: BinaryId | None = None
    wait: Seconds | None = None
    finished: bool = False
    step: int = 0
    groups: Annotated[Sequence[BatchGroup], Meta(max_length=MAX_BATCH_GROUPS)] = ()


class AppliedRequest(ApiRecord, frozen=True):
    epoch: Step
    batch: HexId
    step: Step


class AckRequest(ApiRecord, frozen=True):
    epoch: Step
    step: Step
    batches: BatchIds
    checkpoint: HexHash


class TakeAuditRequest(ApiRequest, frozen=True):
    version: VersionText


class TakeAuditAnswer(ApiRecord, frozen=True):
    """If no field is set, there is no result to audit."""

    worker: str | None = None
    result: bytes | None = None


class ReportAuditRequest(ApiRecord, frozen=True):
    """``mean_gap``, ``largest_gap``: between the worker's and the recomputed log-probabilities, in nats."""

    job: HexId
    lease: HexId
    mean_gap: Gap
    largest_gap: Gap
    agrees: bool


class PutProbesRequest(ApiRecord, frozen=True):
    sequences: TokenSequences


class ProbeSetId(ApiRecord, frozen=True):
    set: HexId


class ProbeScores(ApiRecord, frozen=True):
    """``worker``: its name. ``engine``: its name at its peer. ``scores``: encoded. ``id``: this answer's."""

    id: BinaryId
    worker: str
    engine: str
    version: VersionText
    scores: Annotated[bytes, Meta(max_length=SCORE_BYTES * MAX_PROBE_TOKENS)]


class ReadProbesAnswer(ApiRecord, frozen=True):
    """``known``: whether the ledger has this probe set. ``answers``: scores without a verdict."""

    known: bool
    answers: Annotated[Sequence[ProbeScores], Meta(max_length=MAX_VERDICTS)] = ()


class ProbeVerdict(ApiRecord, frozen=True):
    """A verdict on the scores ``id``. ``kl``, ``floor``: nats per token. ``floor`` is None while it is being measured,
    and ``kl`` is None if the learner cannot compare the scores.
    """

    id: HexId
    alarm: bool
    kl: Divergence | None = None
    floor: Divergence | None = None


class JudgeProbesRequest(ApiRecord, frozen=True):
    verdicts: Annotated[Sequence[ProbeVerdict], Meta(max_length=MAX_VERDICTS)]


class DrainRequest(ApiRequest, frozen=True):
    """The workers with this name get no leases for ``for_s`` seconds; with 0, they get leases again."""

    name: Name
    for_s: DrainSeconds


class DrainAnswer(ApiRecord, frozen=True):
    leases: int


class StayRequest(ApiRecord, frozen=True):
    for_s: DrainSeconds


class RunStatus(ApiRecord, frozen=True):
    """The part of the ledger's ``/status`` that a trainer reads. ``learner``: its version. Ledgers of earlier releases
    do not send ``acknowledged``.
    """

    task: str
    staleness: int
    batch_groups: int
    learner: VersionText
    acknowledged: int = 0


STATUS: Final = ApiRoute("status", "trainer", Nothing, RunStatus)
GROUPS: Final = ApiRoute("groups", "trainer", GroupsRequest, GroupsAnswer, packs=True)
READ_GROUPS: Final = ApiRoute("groups/read", "trainer", ReadGroupsRequest, ReadGroupsAnswer)
PUBLISH: Final = ApiRoute("versions", "trainer", PublishRequest, Nothing)
RESUME: Final = ApiRoute("learner/resume", "trainer", ResumeRequest, ResumeAnswer)
TAKE: Final = ApiRoute("batches/take", "trainer", TakeRequest, TakeAnswer, packed=True)
APPLIED: Final = ApiRoute("batches/applied", "trainer", AppliedRequest, Nothing)
ACK: Final = ApiRoute("batches/ack", "trainer", AckRequest, Nothing)
TAKE_AUDIT: Final = ApiRoute("audits/take", "trainer", TakeAuditRequest, TakeAuditAnswer, packed=True)
REPORT_AUDIT: Final = ApiRoute("audits/report", "trainer", ReportAuditRequest, Nothing)
PUT_PROBES: Final = ApiRoute("probes/set", "trainer", PutProbesRequest, ProbeSetId)
READ_PROBES: Final = ApiRoute("probes/read", "trainer", ProbeSetId, ReadProbesAnswer, packed=True)
JUDGE_PROBES: Final = ApiRoute("probes/judged", "trainer", JudgeProbesRequest, Nothing)
DRAIN: Final = ApiRoute("workers/drain", "trainer", DrainRequest, DrainAnswer)
STAY: Final = ApiRoute("workers/stay", "trainer", StayRequest, Nothing)
