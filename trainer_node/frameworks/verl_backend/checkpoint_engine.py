"""verl's checkpoint engine "p2pcast": actor rank 0 publishes to the hub, rollout workers read at their machine's peer.

Guarantees: every actor rank iterates the tensors to their end, also when publishing fails, because gathering them is
collective. A rollout worker yields no tensor before the whole version of this sync is staged at its peer. Another
version, or none in time, is an error. The peer keeps the version in place until ``finalize``: tensors may be used until
then.

Calls of one sync, in order: ``prepare`` and ``init_process_group`` everywhere; ``send_weights`` on actors beside
``receive_weights`` on rollout workers; ``finalize`` everywhere. With the manager of ``early_staging``, ``send_weights``
and ``stage`` come before the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.reader import Reader
from trainer_node.frameworks.verl_backend.engine_settings import EngineSettings
from trainer_node.frameworks.verl_backend.peer_wait import peer_folder, peer_status, wait_staged

if TYPE_CHECKING:
    import torch

    from trainer_node import Publisher
    from trainer_node.sdk.publication_handle import Handle

BACKEND = "p2pcast"
PROLONGATIONS = 4
"""How often a lease is prolonged within ``hold_s``, while tensors are installed. A short lease is prolonged, since a
worker that was killed blocks its peer for the rest of the lease.
"""
Weights = Iterable[tuple[str, "torch.Tensor"]]
Metrics = dict[str, float]


@CheckpointEngineRegistry.register(BACKEND)
class P2PCastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One in each actor rank and each rollout worker. verl gives ``bucket_size``, which is not used, and ``is_master``:
    whether this actor rank publishes. ``settings``: see EngineSettings. Raises UsageError for settings.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._settings = EngineSettings.of(settings)
        self._is_master = is_master
        self._publisher: Publisher | None = None
        self._handle: Handle | None = None
        self._after: Version | None = None
        """Newest version at the hub before this sync."""
        self._staged: Version | None = None
        """The version of this sync, once it is staged here."""
        self._lease = contextlib.ExitStack()
        """Holds the peer at the version of this sync."""
        self._sync = 0
        """Number of this sync: a wait that a failed sync has left behind ends."""

    # -- both sides

    def prepare(self) -> dict[str, str | None]:
        """Begins a sync. Rank 0 reaches the hub and returns its newest version as ``newest``. Rollout workers reach
        their peer in ``init_process_group``, which tells them that they are rollout workers.
        """
        self._sync += 1
        self._staged = None
        self._release()
        if not self._is_master:
            return {}
        if self._handle is not None:
            # A failed sync may have left a version on its way: the hub stores or aborts that version first.
            with contextlib.suppress(P2PCastError):
                self._handle.wait_durable(self._settings.wait_s)
        newest = self._hub().newest
        return {"newest": None if newest is None else str(newest)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str | None]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tells every rank of both groups its side, and the newest version at the hub."""
        after = metadata[0]["newest"]

        def told(ranks: int, reads: bool) -> dict[str, list[Any]]:
            return {"after": [after] * ranks, "reads": [reads] * ranks}

        return told(actor_wg_world_size, False), told(rollout_world_size, True)

    def init_process_group(self, after: str | None, reads: bool) -> str | None:
        """``after``: newest version at the hub before this sync. ``reads``: whether this is a rollout worker. Returns
        the version that its peer has staged. Raises RetryableError when no peer runs on the folder.
        """
        self._after = None if after is None else Version.parse(after)
        if not reads:
            return None
        staged = peer_status(peer_folder(self._settings.peer))["staged"]
        return None if staged is None else str(staged)

    def finalize(self) -> None:
        """Ends the lease of the version. Raises RetryableError if the peer had ended it before: then the installed
        weights may be mixed, and verl must not resume generation.
        """
        self._lease.close()

    # -- actors

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> Metrics:
        """Publishes, on rank 0, and waits until the hub has stored the version. Raises UsageError for tensors that do
        not fit, RetryableError when the version was aborted.
        """
        if not self._is_master:
            for _ in weights:
                pass
            return {}
        began = time.monotonic()
        publisher = self._hub()
        newest = publisher.newest
        step = global_steps if global_steps is not None else 0 if newest is None else newest.step + 1
        # The first version of this process: versions of an earlier run of the trainer are left behind on their branch.
        again = self._handle is None and newest is not None and newest.step > 0
        tensors = iter(weights)
        try:
            publish = publisher.resume if again else publisher.publish
            self._handle = publish(step, tensors, streamed=True)
        finally:
            # After an error the other ranks still gather the rest.
            for _ in tensors:
                pass
        copied = time.monotonic()
        version = await asyncio.to_thread(self._handle.wait_durable, self._settings.wait_s)
        stored = time.monotonic()
        return {
            "p2pcast/branch": version.branch,
            "p2pcast/step": version.step,
            "p2pcast/gather_s": copied - began,
            "p2pcast/store_s": stored - copied,
        }

    def _hub(self) -> Publisher:
        if self._publisher is None:
            import torch.distributed as dist

            from trainer_node import Publisher

            alone = None
            if dist.is_available() and dist.is_initialized():
                alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            settings = self._settings
            self._publisher = Publisher(
                settings.hub,
                token_file=settings.token_file,
                base=settings.base,
                group=alone,
                plaintext=settings.plaintext,
            )
        return self._publisher

    # -- rollout workers

    def stage(self, version: str) -> float:
        """Waits until the peer has staged exactly this version; returns the seconds of waiting. Raises RetryableError:
        the version has not arrived in time, or a newer one has.
        """
        began = time.monotonic()
        wanted = Version.parse(version)
        staged = self._wait(wanted, self._sync)
        if staged != wanted:
            raise RetryableError(self._other(staged, str(wanted)))
        self._staged = staged
        return time.monotonic() - began

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields views of the peer's memory, valid until ``finalize``, and to be left unchanged. Raises as ``stage``
        does.
        """
        sync = self._sync
        if self._staged is None:
            # Each sync publishes one version: the first one after ``after`` is the version of this sync.
            first = Version(0, 0) if self._after is None else Version(self._after.branch, self._after.step + 1)
            staged = await asyncio.to_thread(self._wait, first, sync)
            if global_steps is not None and staged.step != global_steps:
                raise RetryableError(self._other(staged, f"of step {global_steps}"))
            self._staged = staged
        reader = Reader(peer_folder(self._settings.peer), hold_s=self._settings.hold_s, wait_s=self._settings.wait_s)
        try:
            await asyncio.to_thread(self._lease.enter_context, reader)
            if reader.version != self._staged or sync != self._sync:
                raise RetryableError(self._other(reader.version, str(self._staged)))
            prolonged = time.monotonic()
            for name, tensor in reader.tensors():
                yield name, tensor
                if time.monotonic() - prolonged > self._settings.hold_s / PROLONGATIONS:
                    await asyncio.to_thread(reader.prolong)
                    prolonged = time.monotonic()
            await asyncio.to_thread(reader.prolong)
        except BaseException:
            self._release()
            raise

    def _wait(self, version: Version, sync: int) -> Version:
        """The staged version, once it is ``version`` or newer."""
        folder = peer_folder(self._settings.peer)
        return wait_staged(folder, version, self._settings.wait_s, lambda: sync == self._sync)

    def _other(self, staged: Version, wanted: str) -> str:
        return (
            f"the peer at {self._settings.peer} has staged version {staged}, and this sync needs version {wanted}:"
            " another trainer publishes to this hub, or a later sync has begun; no weight was installed"
        )

    def _release(self) -> None:
        """Ends the lease of a sync that failed."""
        with contextlib.suppress(P2PCastError):
            self._lease.close()
