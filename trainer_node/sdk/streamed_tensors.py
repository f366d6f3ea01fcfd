"""Copies tensors into the snapshot one by one, as an iterator yields them (frameworks gather them this way).

Guarantees: no tensor is kept once the next is asked for, so a rank never holds a second model. The exception are
tensors in no table: they are kept on the host until all have come, and it is clear whether they are tied to others.
A single UsageError lists every difference from the tables, as ``tensors.fit`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from p2pcast.ground.errors import UsageError
from trainer_node.sdk.snapshot import Rooms
from trainer_node.sdk.tensors import ExpectedTensors, LiveTensor, castable, check, fault

SHARD = "{}: is a DTensor; the iterator has to give whole tensors (full_tensor())"


class StreamedTensors:
    """Call ``take`` with each tensor, then ``finish``. ``pieces``: for each tensor name, the slots in ``rooms`` that
    this rank fills, with the first word of each. ``known``: the tables to match; the first is the published state's.
    ``cuda``: the CUDA device of all tensors that are not on the host.

    A rank compares only the words that it sends. If one name comes with two different values, ranks that do not send
    that tensor notice nothing, and learn from the hub that the version was aborted.
    """

    def __init__(
        self,
        rooms: Rooms,
        pieces: dict[str, Sequence[tuple[int, int]]],
        known: Sequence[ExpectedTensors],
        cuda: torch.device | None = None,
    ) -> None:
        self._rooms, self._pieces, self._known, self._cuda = rooms, pieces, known, cuda
        self._expected = {name for table in known for name in table.tensors}
        self._arrived: dict[str, LiveTensor] = {}
        """The expected tensors so far, on the meta device: only names, shapes and dtypes."""
        self._extra: list[LiveTensor] = []
        """The tensors in no table: they are either tied to others, or unexpected."""
        self._faults: list[str] = []

    def take(self, one: LiveTensor) -> None:
        tensor = one.tensor
        if isinstance(tensor, DTensor):
            self._faults.append(SHARD.format(one.name))
        elif tensor.device.type == "cuda" and tensor.device != self._cuda:
            self._faults.append(f"{one.name}: lies on {tensor.device}, the first tensor does not")
        elif (why := fault(one)) is not None:
            self._faults.append(why)
        elif one.name in self._arrived:
            if not self._is_copied(one, one.name):
                self._faults.append(f"{one.name}: comes twice, with different values")
        elif one.name not in self._expected:
            self._extra.append(LiveTensor(one.name, tensor.to("cpu", copy=True)))
        else:
            self._arrived[one.name] = _without_values(one)
            if self._fits(one, one.name):
                self._rooms.take(tensor, self._pieces.get(one.name, ()))

    def finish(self) -> None:
        """Raises UsageError if the tensors differ from those of the tables."""
        for one in self._extra:
            if not any(self._is_tied(one, name) for name in self._arrived):
                self._arrived.setdefault(one.name, _without_values(one))
        check(list(self._arrived.values()), self._faults, self._known)

    def _fits(self, one: LiveTensor, name: str) -> bool:
        """Whether the tensor may be published under this name."""
        target = self._known[0].tensors.get(name)
        return target is not None and one.shape == target.shape and castable(one.tensor.dtype, target.dtype)

    def _is_copied(self, one: LiveTensor, name: str) -> bool:
        return self._fits(one, name) and self._rooms.has(one.tensor, self._pieces.get(name, ()))

    def _is_tied(self, one: LiveTensor, name: str) -> bool:
        """Whether the tensor has the values of tensor ``name``. Matrices of a single value may be equal by chance."""
        flat = one.tensor.reshape(-1)
        varied = one.tensor.dim() >= 2 and bool((flat != flat[:1]).any())
        return (varied or not flat.numel()) and self._is_copied(one, name)


def on_host(one: LiveTensor) -> LiveTensor:
    """Return a copy of the tensor on the host. Raises UsageError for a DTensor."""
    if isinstance(one.tensor, DTensor):
        raise UsageError(SHARD.format(one.name))
    return one if one.tensor.is_meta else LiveTensor(one.name, one.tensor.to("cpu", copy=True))


def _without_values(one: LiveTensor) -> LiveTensor:
    return LiveTensor(one.name, torch.empty_like(one.tensor, device="meta"))
