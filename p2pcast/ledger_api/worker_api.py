"""Requests of workers to the ledger, and its responses (docs/reference/http.md). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

from msgspec import Meta

from p2pcast.ground.limits import MAX_ENGINE_NAME, MAX_SLOTS
from p2pcast.ledger_api.api_route import (
    MAX_LIST,
    ApiRecord,
    ApiRequest,
    ApiRoute,
    BinaryId,
    HexHash,
    HexId,
    Name,
    Nothing,
    PackedRequest,
    Seconds,
    TokenSequences,
    VersionText,
)
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, SCORE_BYTES
from p2pcast.rollouts.return_reason import MAX_DETAIL, MAX_REASON

MAX_WAIT_S: Final = 30.0
"""How long a request for leases may wait for jobs, in seconds."""

Slots: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
EngineName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ENGINE_NAME)]


class DeviceClasses(ApiRequest, frozen=True):
    """A worker's hardware class. Workers of the same class are expected to be equally fast."""

    gpu: Annotated[str, Meta(max_length=128)] | None = None


class Registration(ApiRequest, frozen=True):
    """``leases``: those that the worker is still playing; its others return to the pool. None: the worker does not
    know. ``lost``: the previous session.
    """

    name: Name
    slots: Slots
    task: Name
    task_hash: HexHash
    price_usd_h: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    classes: DeviceClasses | None = None
    leases: Annotated[Sequence[HexId], Meta(max_length=2 * MAX_SLOTS)] | None = None
    lost: HexId | None = None


class Registered(ApiRecord, frozen=True):
    """``session``: to be used in the worker's later requests. ``name``: the assigned name, which differs if the
    requested one is taken. ``heartbeat_s``: interval of heartbeats. ``check_s``: time limit for checking one result.
    """

    worker: HexId
    session: HexId
    name: str = ""
    heartbeat_s: float | None = None
    check_s: float | None = None


class ServingEngine(ApiRequest, frozen=True):
    """``served``, ``manifest``: the version of the engine's weights, and the hash of its signed manifest."""

    session: HexId
    served: VersionText
    manifest: HexHash


class EngineOfPeer(ApiRequest, frozen=True):
    """``node``: the peer's. ``name``: the engine's name at the peer."""

    node: HexId
    name: EngineName


class LeaseRequest(ServingEngine, frozen=True):
    """``staged``: the version that the engine may switch to next."""

    slots: Slots
    staged: VersionText | None = None
    engine: EngineOfPeer | None = None
    wait_s: Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)] | None = None


class Leased(NamedTuple):
    """``expires_in_s``: unless a heartbeat with new tokens extends the lease. ``latest_in_s``: when the lease expires
    at the latest.
    """

    lease: bytes
    job: Job
    expires_in_s: float
    latest_in_s: float


class LeaseRow(ApiRecord, frozen=True):
    """``Leased``, with the encoded job."""

    lease: BinaryId
    job: bytes
    expires_in_s: Seconds
    latest_in_s: Seconds


class LeaseAnswer(ApiRecord, frozen=True):
    """``finished``: whether the run is over. ``retry_s``: delay before the next request."""

    leases: Annotated[Sequence[LeaseRow], Meta(max_length=MAX_LIST)]
    finished: bool
    retry_s: Seconds


class LeaseTokens(ApiRecord, frozen=True):
    lease: HexId
    tokens: Annotated[int, Meta(ge=0, le=1 << 40)]


class HeartbeatRequest(ApiRecord, frozen=True):
    session: HexId
    leases: Annotated[Sequence[LeaseTokens], Meta(max_length=MAX_SLOTS)]


class HeldLease(ApiRecord, frozen=True):
    """``state``: held, abort or unknown."""

    lease: HexId
    state: str
    expires_in_s: float


class HeartbeatAnswer(ApiRecord, frozen=True):
    leases: Sequence[HeldLease]
    heartbeat_s: float | None = None


class LeaseReason(ApiRequest, frozen=True):
    """``reason``: the ledger ignores an unknown one. ``detail``: one line for people."""

    lease: HexId
    reason: Annotated[str, Meta(max_length=MAX_REASON)]
    detail: Annotated[str, Meta(max_length=MAX_DETAIL)] | None = None


class ReturnRequest(ApiRecord, frozen=True):
    session: HexId
    leases: Annotated[Sequence[HexId], Meta(max_length=MAX_SLOTS)]
    reasons: Annotated[Sequence[LeaseReason], Meta(max_length=MAX_SLOTS)] | None = None


class ResultsRequest(PackedRequest, frozen=True):
    """``results``: the encoded records."""

    session: BinaryId
    results: Annotated[Sequence[bytes], Meta(max_length=MAX_LIST)]


class Settled(ApiRecord, frozen=True):
    """``verdict``: accepted or rejected. ``reason``, ``detail``: None for an accepted result."""

    job: HexId
    lease: HexId
    verdict: str
    reason: str | None
    detail: str | None

    @property
    def accepted(self) -> bool:
        return self.verdict == "accepted"


class ResultsAnswer(ApiRecord, frozen=True):
    results: Sequence[Settled]


class TakeProbeAnswer(ApiRecord, frozen=True):
    """The learner's probe set. If no field is set, no scores are needed now."""

    set: BinaryId | None = None
    sequences: TokenSequences | None = None


class ReportProbeRequest(ServingEngine, frozen=True):
    """``scores``: float32, little-endian, in hexadecimal."""

    set: HexId
    engine: EngineName
    scores: Annotated[str, Meta(max_length=2 * SCORE_BYTES * MAX_PROBE_TOKENS)]


class ReportProbeAnswer(ApiRecord, frozen=True):
    """``wanted``: False if the ledger did not ask for the scores."""

    wanted: bool


REGISTER: Final = ApiRoute("workers", "worker", Registration, Registered)
LEASE: Final = ApiRoute("lease", "worker", LeaseRequest, LeaseAnswer, packed=True)
HEARTBEAT: Final = ApiRoute("heartbeat", "worker", HeartbeatRequest, HeartbeatAnswer)
RETURN: Final = ApiRoute("return", "worker", ReturnRequest, Nothing)
RESULTS: Final = ApiRoute("results", "worker", ResultsRequest, ResultsAnswer, packs=True)
TAKE_PROBE: Final = ApiRoute("probes/take", "worker", ServingEngine, TakeProbeAnswer, packed=True)
REPORT_PROBE: Final = ApiRoute("probes/report", "worker", ReportProbeRequest, ReportProbeAnswer)
