"""One artifact in a node: its pieces, its state and its source.

Promises:

- ``HoldingState`` (p2pcast.relay.holding_state) is the only record of the artifact's progress.
- Only methods of ``Holding`` write the state, the source and what is stored.
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
"""Compared for every piece: in Python 3.11, looking up an enum member takes ten times as long."""


class ArtifactSource(Protocol):
    """A sender of whole artifacts: a parent, or a mirror."""

    live: bool
    """Whether the source pushes each version as it opens."""

    def pushes(self, artifact: bytes) -> bool:
        """Whether an artifact that opens at this source is forwarded to children at once."""


class ArtifactHolder(Protocol):
    """The part of a node (p2pcast.relay.node) that readers of its holdings use."""

    @property
    def holdings(self) -> Mapping[bytes, Holding]:
        """The holdings by artifact id."""


class ArtifactReceiver(ArtifactHolder, Protocol):
    """The part of a node used by what sends artifacts to it: a link to a parent, or a mirror."""

    @property
    def run_key(self) -> bytes: ...
    @property
    def layouts(self) -> Mapping[bytes, Layout]: ...
    @property
    def pulled(self) -> AbstractSet[bytes]:
        """Artifacts that are pulled from other nodes, so that no parent may send them."""

    @property
    def paused(self) -> bool:
        """Whether the node takes no more pieces for now, because its disk is behind."""

    def add_layout(self, layout: Layout) -> None: ...
    def open(self, open_signed: bytes, source: ArtifactSource | None) -> Holding: ...
    def add_batch(self, holding: Holding, signed: bytes) -> None: ...
    def add_piece(self, holding: Holding, index: int, payload: memoryview) -> None: ...
    def seal(self, holding: Holding, signed: bytes) -> None: ...
    def confirm(self, holding: Holding, signed: bytes) -> None: ...
    def forward(self) -> None: ...
    def count_corrupt(self, sender: bytes | None) -> None: ...


class Holding:
    """``artifact.held``: the pieces that matched their hash; ``stored``: those of them that are in the log."""

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
        """``opened_at``: seconds by the loop's clock; ``had_bytes``: bytes received by an earlier process."""
        if state not in BIRTH:
            raise IllegalStepError(f"a holding cannot begin as {state.value}")
        self.artifact = artifact
        self.assembly: Assembly = artifact.assembly
        self.open: Open = artifact.open
        self.id = artifact.id
        self.log = log
        self.stored = PieceSet() if stored is None else stored
        self.made = state is HoldingState.MAKING
        """Whether this node made the artifact instead of receiving it."""
        self.opened_at = opened_at
        self.completed_at: float | None = opened_at if state is HoldingState.DURABLE else None
        """When the state became ``VERIFIED``, in seconds by the loop's clock."""
        self.had_bytes = had_bytes
        self.progress = asyncio.Event()
        """Set whenever more can be decoded, at the end, and on an abort. Readers clear it before they check."""
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
        """The source that currently sends this artifact; None if it is pulled."""
        return self._source

    @property
    def incomplete(self) -> bool:
        """Whether pieces or records are missing and may still arrive."""
        return self._state in MISSING

    @property
    def complete(self) -> bool:
        """Whether every record and piece has been verified."""
        return self._state in COMPLETE

    @property
    def finished(self) -> bool:
        """Every piece is in the log."""
        return self._state in IN_LOG

    @property
    def durable(self) -> bool:
        """Whether the artifact is sealed in this node's store."""
        return self._state is HoldingState.DURABLE

    @property
    def aborted(self) -> bool:
        """Whether the hub called the artifact off, or this node gave it up."""
        return self._state is _ABORTED

    @property
    def idle(self) -> bool:
        return self._state is HoldingState.IDLE

    @property
    def excerpt(self) -> bool:
        return self._state is HoldingState.EXCERPT

    @property
    def offered(self) -> bool:
        """Whether children and other nodes may ask for the artifact."""
        return self._state is not HoldingState.IDLE and self._state is not HoldingState.EXCERPT

    @property
    def needs_source(self) -> bool:
        """Whether pieces or records are missing that this node does not make and no source sends."""
        return self._source is None and self._state in MISSING and self._state is not HoldingState.MAKING

    @property
    def confirmed(self) -> bool:
        """Whether the hub is known to have the version on its disk."""
        return self._state is HoldingState.DURABLE or self.assembly.confirmed

    @property
    def irrevocable(self) -> bool:
        """Whether the artifact is complete here and confirmed by the hub, so that it can no longer be called off."""
        return self._state in COMPLETE and self.confirmed

    @property
    def all_stored(self) -> bool:
        """Whether every piece is in the log, even if the owner has not been informed yet."""
        return self.artifact.complete and self.stored.count == self.assembly.pieces

    @property
    def took_s(self) -> float:
        """Seconds from the opening to the last verified piece; 0 before that."""
        return 0.0 if self.completed_at is None else self.completed_at - self.opened_at

    async def until_confirmed(self) -> bool:
        """Wait until the artifact is confirmed or aborted. Returns False if it was aborted."""
        await self._confirmed.wait()
        return not self.aborted

    async def until_durable(self) -> None:
        """Wait until the artifact is sealed. Raises a failed sealing's error, and RetryableError after an abort."""
        await self._sealed.wait()
        if self._failure is not None:
            raise self._failure
        if self.aborted:
            raise RetryableError(
                f"version {self.open.version} was aborted by the hub, or now comes from another source"
            )

    async def until_proved(self) -> bool:
        """Wait for the proof, if one is required. Returns whether the artifact decodes to what its manifest says."""
        return True if self._proof is None else await self._proof

    # -- steps

    def _take(self, step: HoldingStep) -> None:
        """The only writer of the state."""
        self._state = after(self._state, step)
        if self._state not in SOURCED:
            self._source = None
        self._wake()

    def _wake(self) -> None:
        """Wake every waiter whose condition now holds."""
        if self._state in SETTLED:
            self._sealed.set()
        if self._state is HoldingState.ABORTED or self.confirmed:
            self._confirmed.set()

    def want(self) -> None:
        """Note that the rest of an idle artifact is needed after all. Does nothing in other states."""
        if self._state is HoldingState.IDLE:
            self._take(HoldingStep.WANT)

    def receive_from(self, source: ArtifactSource) -> None:
        """Note that ``source`` sends what is missing. Raises IllegalStepError if a different source already does."""
        if self._source is source:
            return
        if self._source is not None:
            raise IllegalStepError("a holding cannot have two sources")
        self._take(HoldingStep.RECEIVE)
        self._source = source

    def lose_source(self, source: ArtifactSource) -> None:
        """Note that ``source`` sends no more. Does nothing if it is not the source."""
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
        """Add the hub's durable record, and return whether it is the first. Raises IntegrityError."""
        known = self.assembly.durable_signed
        self.assembly.add_durable(signed)
        self._wake()
        return known is None

    def note_stored(self, pieces: Iterable[int]) -> None:
        """Note that these pieces are in the log."""
        for index in pieces:
            self.stored.add(index)
        self.progress.set()

    def note_made(self, pieces: Iterable[int]) -> None:
        """Note that this node's packer has written these pieces to the log; a signed batch vouches for them."""
        for index in pieces:
            self.artifact.held.add(index)
            self.stored.add(index)
        self.progress.set()

    def verify(self, now: float) -> None:
        """Note that the last missing record or piece was verified at ``now``, in seconds by the loop's clock."""
        self._take(HoldingStep.VERIFY)
        self.completed_at = now

    def finish(self) -> None:
        """Note that the last piece is in the log."""
        self._take(HoldingStep.FINISH)
        self.progress.set()

    def seal(self) -> None:
        """Note that the owner has sealed the artifact in the store."""
        self._take(HoldingStep.SEAL)

    def fail_seal(self, error: P2PCastError) -> None:
        """Note that the owner could not seal the artifact: ``until_durable`` raises ``error``."""
        self._failure = error
        self._take(HoldingStep.FAIL_SEAL)

    def abort(self) -> None:
        """Note that the hub called the artifact off, or this node gave it up. Waiters wake and find ``aborted``."""
        self._take(HoldingStep.ABORT)
        self.progress.set()

    def require_proof(self) -> None:
        """Make ``until_proved`` wait for ``prove``. Only for an artifact that this node makes."""
        if self._state is not HoldingState.MAKING:
            raise IllegalStepError(f"a holding that is {self._state.value} needs no proof")
        self._proof = asyncio.get_running_loop().create_future()

    def prove(self, *, good: bool) -> None:
        """Set the proof's result. ``good``: whether the artifact decodes to what its manifest says."""
        assert self._proof is not None, "require_proof was not called"
        self._proof.set_result(good)

    # -- invariants

    def validate(self) -> None:
        """Raise AssertionError naming the first broken invariant. Invariants hold between any two events of a node."""
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
