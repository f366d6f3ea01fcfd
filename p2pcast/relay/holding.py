"""One artifact in a node: its pieces, its state and its source.

Promises:

- ``HoldingState`` (p2pcast.relay.holding_state) is the only record of how far the artifact has come.
- Methods of ``Holding`` alone write the state, the source and what was stored.
- ``validate`` names every broken invariant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import Open
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.relay.holding_state import (
    BIRTH,
    COMPLETE,
    IN_LOG,
    MISSING,
    SETTLED,
    SOURCED,
    HoldingState,
    HoldingStep,
    IllegalStepError,
    after,
)
from p2pcast.relay.verified_pieces import VerifiedPieces
from p2pcast.store.artifact_log import ArtifactLog

_ABORTED = HoldingState.ABORTED
"""Compared for every piece: with Python 3.11 the lookup of an enum's member takes ten times as long."""


class ArtifactSource(Protocol):
    """A sender of whole artifacts: a parent, or a mirror."""

    live: bool
    """The source pushes each version as it opens."""

    def pushes(self, artifact: bytes) -> bool:
        """Whether an artifact that opens at this source is passed on at once to children."""


class ArtifactHolder(Protocol):
    """A node (p2pcast.relay.node), as a reader of what it holds sees it."""

    @property
    def holdings(self) -> Mapping[bytes, Holding]:
        """By artifact."""


class ArtifactReceiver(ArtifactHolder, Protocol):
    """A node, as a sender of artifacts to it sees it: a link to a parent, or a mirror."""

    @property
    def run_key(self) -> bytes: ...
    @property
    def layouts(self) -> Mapping[bytes, Layout]: ...
    @property
    def pulled(self) -> AbstractSet[bytes]:
        """Artifacts that are pulled from other nodes: no parent may send them."""

    @property
    def paused(self) -> bool:
        """The disk is behind: the node takes no more pieces now."""

    def add_layout(self, layout: Layout) -> None: ...
    def open(self, open_signed: bytes, source: ArtifactSource | None) -> Holding: ...
    def add_batch(self, holding: Holding, signed: bytes) -> None: ...
    def add_piece(self, holding: Holding, index: int, payload: memoryview) -> None: ...
    def seal(self, holding: Holding, signed: bytes) -> None: ...
    def confirm(self, holding: Holding, signed: bytes) -> None: ...
    def forward(self) -> None: ...
    def count_corrupt(self, sender: bytes | None) -> None: ...


class Holding:
    """``artifact.held``: pieces that matched their hash; ``stored``: those of them that are in the log."""

    __slots__ = (
        "_confirmed", "_failure", "_proof", "_sealed", "_source", "_state", "artifact", "assembly", "completed_at",
        "had_bytes", "id", "log", "made", "open", "opened_at", "progress", "stored",
    )  # fmt: skip

    def __init__(
        self,
        artifact: VerifiedPieces,
        log: ArtifactLog,
        state: HoldingState = HoldingState.WAITING,
        *,
        stored: PieceSet | None = None,
        source: ArtifactSource | None = None,
        opened_at: float = 0.0,
        had_bytes: int = 0,
    ) -> None:
        """``opened_at``: seconds of the loop's clock; ``had_bytes``: received by an earlier process."""
        if state not in BIRTH:
            raise IllegalStepError(f"a holding cannot begin as {state.value}")
        self.artifact = artifact
        self.assembly: Assembly = artifact.assembly
        self.open: Open = artifact.open
        self.id = artifact.id
        self.log = log
        self.stored = PieceSet() if stored is None else stored
        self.made = state is HoldingState.MAKING
        """This node made the artifact; it was not received."""
        self.opened_at = opened_at
        self.completed_at: float | None = opened_at if state is HoldingState.DURABLE else None
        """When the state became ``VERIFIED``, in seconds of the loop's clock."""
        self.had_bytes = had_bytes
        self.progress = asyncio.Event()
        """Set whenever more can be decoded, at the end, and at an abort. Readers clear it before they look."""
        self._state = state
        self._source = source
        self._confirmed = asyncio.Event()
        self._sealed = asyncio.Event()
        self._failure: P2PCastError | None = None
        self._proof: asyncio.Future[bool] | None = None
        self._wake()

    # -- questions

    @property
    def state(self) -> HoldingState:
        return self._state

    @property
    def source(self) -> ArtifactSource | None:
        """The source that sends this artifact now; None for one that is pulled."""
        return self._source

    @property
    def incomplete(self) -> bool:
        """Pieces or records are missing, and may still come."""
        return self._state in MISSING

    @property
    def complete(self) -> bool:
        """Every record and piece was verified."""
        return self._state in COMPLETE

    @property
    def finished(self) -> bool:
        """Every piece is in the log."""
        return self._state in IN_LOG

    @property
    def durable(self) -> bool:
        """Sealed in the store of this node."""
        return self._state is HoldingState.DURABLE

    @property
    def aborted(self) -> bool:
        """Called off by the hub, or given up by this node."""
        return self._state is _ABORTED

    @property
    def idle(self) -> bool:
        return self._state is HoldingState.IDLE

    @property
    def excerpt(self) -> bool:
        return self._state is HoldingState.EXCERPT

    @property
    def offered(self) -> bool:
        """Children and other nodes may ask for the artifact."""
        return self._state is not HoldingState.IDLE and self._state is not HoldingState.EXCERPT

    @property
    def needs_source(self) -> bool:
        """Pieces or records are missing, this node does not make them, and no source sends them."""
        return self._source is None and self._state in MISSING and self._state is not HoldingState.MAKING

    @property
    def confirmed(self) -> bool:
        """The hub is known to hold the version on its own disk."""
        return self._state is HoldingState.DURABLE or self.assembly.confirmed

    @property
    def irrevocable(self) -> bool:
        """Complete here and confirmed by the hub: no later word calls the artifact off."""
        return self._state in COMPLETE and self.confirmed

    @property
    def all_stored(self) -> bool:
        """Every piece is in the log, whether or not the owner was told."""
        return self.artifact.complete and self.stored.count == self.assembly.pieces

    @property
    def took_s(self) -> float:
        """Seconds from the opening to the last verified piece; 0 before that."""
        return 0.0 if self.completed_at is None else self.completed_at - self.opened_at

    async def until_confirmed(self) -> bool:
        """False when the artifact was aborted."""
        await self._confirmed.wait()
        return not self.aborted

    async def until_durable(self) -> None:
        """Raises the error of a failed sealing, and RetryableError after an abort."""
        await self._sealed.wait()
        if self._failure is not None:
            raise self._failure
        if self.aborted:
            raise RetryableError(
                f"version {self.open.version} was aborted by the hub, or now comes from another source"
            )

    async def until_proved(self) -> bool:
        """Whether the artifact decodes to what its manifest says; True where no proof is required."""
        return True if self._proof is None else await self._proof

    # -- steps

    def _take(self, step: HoldingStep) -> None:
        """The only writer of the state."""
        self._state = after(self._state, step)
        if self._state not in SOURCED:
            self._source = None
        self._wake()

    def _wake(self) -> None:
        """Wake every waiter whose condition holds by now."""
        if self._state in SETTLED:
            self._sealed.set()
        if self._state is HoldingState.ABORTED or self.confirmed:
            self._confirmed.set()

    def want(self) -> None:
        """The rest of an idle artifact is needed after all; without effect in other states."""
        if self._state is HoldingState.IDLE:
            self._take(HoldingStep.WANT)

    def receive_from(self, source: ArtifactSource) -> None:
        """``source`` sends the missing rest. Raises IllegalStepError when another source does already."""
        if self._source is source:
            return
        if self._source is not None:
            raise IllegalStepError("a holding cannot have two sources")
        self._take(HoldingStep.RECEIVE)
        self._source = source

    def lose_source(self, source: ArtifactSource) -> None:
        """``source`` sends no more; without effect when it is not the source."""
        if self._source is source:
            self._take(HoldingStep.LOSE_SOURCE)
            self._source = None

    def add_batch(self, signed: bytes) -> None:
        """Raises IntegrityError."""
        if self.assembly.add_batch(signed):
            self.progress.set()

    def add_manifest(self, signed: bytes) -> None:
        """Raises IntegrityError."""
        self.assembly.add_manifest(signed)
        self._wake()

    def add_confirmation(self, signed: bytes) -> bool:
        """Take the hub's durable record; True when it is the first. Raises IntegrityError."""
        known = self.assembly.durable_signed
        self.assembly.add_durable(signed)
        self._wake()
        return known is None

    def note_stored(self, pieces: Iterable[int]) -> None:
        """These pieces are in the log."""
        for index in pieces:
            self.stored.add(index)
        self.progress.set()

    def note_made(self, pieces: Iterable[int]) -> None:
        """The packer of this node wrote these pieces into the log; a signed batch vouches for them."""
        for index in pieces:
            self.artifact.held.add(index)
            self.stored.add(index)
        self.progress.set()

    def verify(self, now: float) -> None:
        """The last missing record or piece was verified at ``now``, in seconds of the loop's clock."""
        self._take(HoldingStep.VERIFY)
        self.completed_at = now

    def finish(self) -> None:
        """The last piece is in the log."""
        self._take(HoldingStep.FINISH)
        self.progress.set()

    def seal(self) -> None:
        """The owner sealed the artifact in the store."""
        self._take(HoldingStep.SEAL)

    def fail_seal(self, error: P2PCastError) -> None:
        """The owner could not seal the artifact: ``until_durable`` raises ``error``."""
        self._failure = error
        self._take(HoldingStep.FAIL_SEAL)

    def abort(self) -> None:
        """Called off by the hub, or given up by this node: every waiter wakes, and finds ``aborted``."""
        self._take(HoldingStep.ABORT)
        self.progress.set()

    def require_proof(self) -> None:
        """Let ``until_proved`` wait for ``prove``: only of an artifact that this node makes."""
        if self._state is not HoldingState.MAKING:
            raise IllegalStepError(f"a holding that is {self._state.value} needs no proof")
        self._proof = asyncio.get_running_loop().create_future()

    def prove(self, *, good: bool) -> None:
        """``good``: the artifact decodes to what its manifest says."""
        assert self._proof is not None, "require_proof was not called"
        self._proof.set_result(good)

    # -- invariants

    def validate(self) -> None:
        """Raises AssertionError that names the first broken invariant. Holds between any two events of a node."""
        state, complete = self._state, self._state in COMPLETE
        where = f"holding of version {self.open.version}, {state.value}"
        ended = state is HoldingState.ABORTED
        for broken, what in (
            (self._source is not None and state not in SOURCED, "a source sends to it"),
            (self._source is None and state is HoldingState.RECEIVING, "no source sends to it"),
            (self.made and state in MISSING - {HoldingState.MAKING}, "it was made here"),
            (not self.made and state is HoldingState.MAKING, "it was not made here"),
            (not self.made and self._proof is not None, "a received artifact requires a proof"),
            (self.made and self.had_bytes, "a made artifact has bytes of an earlier process"),
            (complete and not self.artifact.complete, "records or pieces are missing"),
            (state in MISSING - {HoldingState.EXCERPT} and self.artifact.complete, "nothing is missing"),
            (not ended and complete != (self.completed_at is not None), "completed_at disagrees"),
            (self.took_s < 0, "it completed before it opened"),
            (state in IN_LOG and not self.all_stored, "pieces are missing in the log"),
            (self.stored.count > self.artifact.held.count, "the log has pieces that were not verified"),
            (
                not ended and (self._failure is not None) != (state is HoldingState.SEAL_FAILED),
                "sealing failed or did not",
            ),
            (self._confirmed.is_set() != (ended or self.confirmed), "waiters for the confirmation sleep, or do not"),
            (self._sealed.is_set() != (state in SETTLED), "waiters for the sealing sleep, or do not"),
        ):
            assert not broken, f"{where}: {what}"
