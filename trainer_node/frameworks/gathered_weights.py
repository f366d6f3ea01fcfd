"""Publishes gathered weights from one rank, and waits until engines serve them: the part that adapters share.

Guarantees: at a sync, one gathered tensor after the other is copied, and none is collected. A sync returns when the
stated share of the engines serves the new weights. No call pauses an engine: each peer pauses its own, for the switch
alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

if TYPE_CHECKING:
    import torch

    from trainer_node import Handle, Publisher
    from trainer_node.sdk.tensors import Rename

logger = logging.getLogger("p2pcast.adapters")


class GatheredWeights:
    """Syncs of one rank, which gets all tensors whole.

    ``hub``, ``token_file``, ``base``, ``rename``, ``dtype`` and ``plaintext`` are those of ``Publisher``. ``previous``
    is, too, with another default: rank 0 publishes alone and keeps two whole copies of the published model, in the
    host's memory unless ``previous="gpu"``.

    ``live_fraction``: share of all engines that a sync waits for. With less than 1.0, some engines may still sample
    from earlier weights. None: a sync returns when the weights are copied, and the next sync raises errors of this one.
    ``live_timeout_s``: seconds until a sync raises RetryableError, which names the late engines.

    ``first_step``: step of the first sync, which then always opens a branch; a ledger needs it. None: one more than the
    newest step that the hub knows. ``steps_a_sync``: difference between the steps of two syncs.

    Raises UsageError.
    """

    def __init__(
        self,
        hub: str,
        *,
        token_file: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        previous: Literal["gpu", "pinned"] = "pinned",
        plaintext: bool = False,
        live_fraction: float | None = 1.0,
        live_timeout_s: float = 600.0,
        first_step: int | None = None,
        steps_a_sync: int = 1,
    ) -> None:
        if live_fraction is not None and not 0 < live_fraction <= 1:
            raise UsageError(
                f"live_fraction={live_fraction}: give more than 0 and at most 1, or None to wait for no engine"
            )
        if steps_a_sync < 1:
            raise UsageError(f"steps_a_sync={steps_a_sync}: give 1, or weight_sync_steps of TRL")
        self.first_step, self.steps_a_sync = first_step, steps_a_sync
        self._hub = hub
        self._options: dict[str, Any] = {
            "token_file": token_file,
            "base": base,
            "rename": rename,
            "previous": previous,
            "plaintext": plaintext,
        }
        if dtype is not None:
            self._options["dtype"] = dtype
        self._live_fraction, self._live_timeout_s = live_fraction, live_timeout_s
        self._publisher: Publisher | None = None
        self._handle: Handle | None = None
        self._step: int | None = None
        """Step of the last sync; None before the first sync of a connection."""

    def version(self) -> Version | None:
        """The version of the last sync; None before the first. Waits until the hub has named it, for a sync may return
        before. Raises the errors of ``Handle.wait_begun``.
        """
        return None if self._handle is None else self._handle.wait_begun(self._live_timeout_s)

    def connect(self) -> None:
        """Raises the errors of ``Publisher``."""
        self._connected()

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the tensors as one version. End the job if this raises: other ranks may wait in the gathering.

        Raises UsageError (names or shapes are not the base's), RefusedError (another trainer has taken over) and
        RetryableError (the hub or engines are late).
        """
        publisher = self._connected()
        if self._handle is not None:
            self._handle.wait_durable(self._live_timeout_s)
        newest = 0 if publisher.newest is None else publisher.newest.step
        if self._step is not None:
            step, begin = self._step + self.steps_a_sync, publisher.publish
        elif self.first_step is not None:
            step, begin = self.first_step, publisher.resume
        else:
            # Versions of an earlier process are left behind on their branch.
            step, begin = newest + 1, publisher.resume if newest else publisher.publish
        self._handle = handle = begin(step, tensors, streamed=True)
        self._step = step
        handle.wait_snapshot()
        if self._live_fraction is not None:
            live = handle.wait_live(self._live_fraction, self._live_timeout_s)
            logger.info("version %s is live at %d engines", handle.version, len(live))

    def close(self) -> None:
        """Wait until the last version is stored, and disconnect. A later ``send`` connects anew."""
        publisher, handle = self._publisher, self._handle
        self._publisher = self._handle = self._step = None
        if publisher is not None:
            publisher.close()
        if handle is not None and self._live_fraction is None:
            handle.wait_durable(self._live_timeout_s)

    def _connected(self) -> Publisher:
        if self._publisher is None:
            from trainer_node import Publisher

            self._publisher = Publisher(self._hub, group=_this_rank_alone(), **self._options)
        return self._publisher


def _this_rank_alone() -> Any:
    """A process group of this rank; None if it is the only one. No other rank takes part."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    # The group carries no data. Gloo needs no memory on a GPU.
    return dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
