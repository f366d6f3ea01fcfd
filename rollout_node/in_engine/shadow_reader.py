"""Reads tensors of the shadow (an ordinary safetensors file) through a descriptor sent by the peer.

Guarantee: a file that opens contains exactly the layout's tensors, each at the layout's offset. Nothing is copied
before it is used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import torch

from p2pcast.checkpoint.safetensors_file import header_bytes, parse_header
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from rollout_node.in_engine.loader_recording import TORCH_DTYPES


class ShadowReader:
    """Maps the file; the caller closes ``fd``. Raises IntegrityError if the file is not a state of this layout."""

    def __init__(self, fd: int, layout: Layout) -> None:
        size = os.fstat(fd).st_size
        if size > limits.MAX_STATE_BYTES:
            raise IntegrityError(f"shadow: {size} bytes are over the limit of {limits.MAX_STATE_BYTES}")
        head = os.pread(fd, 8, 0)
        header = parse_header(os.pread(fd, header_bytes(head, size, "shadow"), 8), size, "shadow")
        expected = dict(zip(layout.tensors, layout.offsets, strict=True))
        if dict(header.tensors) != expected:
            raise IntegrityError(
                "shadow: its tensors are not those of the layout; restart the engine if the run has changed"
            )
        self._layout, self._start = layout, header.data_start
        # A private map with write permission, because torch warns about read-only memory. It is never written.
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def words(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Tensor ``number`` as a row of ``dtype``, a view of the file."""
        tensor = self._layout.tensors[number]
        if not tensor.nbytes:
            return torch.empty(0, dtype=dtype)
        at = self._start + self._layout.offsets[number]
        return torch.frombuffer(self._map, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=at)

    def tensor(self, number: int) -> torch.Tensor:
        """Tensor ``number`` as the model's loader expects it, a view of the file. Raises IntegrityError for packed
        dtypes.
        """
        tensor = self._layout.tensors[number]
        dtype = TORCH_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise IntegrityError(
                f"tensor {tensor.name!r}: torch has no dtype {tensor.dtype}, so this engine can't install it"
            )
        return self.words(number, dtype).view(tensor.shape)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, tensor in enumerate(self._layout.tensors):
            yield tensor.name, self.tensor(number)
