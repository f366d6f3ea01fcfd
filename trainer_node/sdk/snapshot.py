"""The publisher's memory: the state that the hub stored last, and the snapshot that is being sent.

Guarantee: a snapshot has the tensors' contents at the call of ``begin``, provided that they do not change until
``finish`` has returned. Casts round as ``Tensor.to`` does; tensors without a cast keep their bits. There are two rooms:
only ``keep`` turns the snapshot into the previous state, whose room then takes the next snapshot.

For tensors on a CUDA device, copies run on their own stream, into the device's memory or into pinned host memory. On
the CPU they run in the thread that calls ``finish``, on torch's own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from p2pcast.codec.digest import word_dtype
from p2pcast.device import words_of
from p2pcast.ground import limits

SEGMENT_BYTES = limits.GIB
"""Largest segment of a room. Segments are limited because torch rounds pinned memory up to a power of two."""
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a part's words are in every room: segment, offset in bytes, number of words and dtype."""

    segment: int
    offset: int
    words: int
    word_bytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Copy:
    """One source and the slots that are filled from it. ``source`` returns the rank's share of a tensor. ``pieces``:
    for each slot, its number and its first word in that share. ``at_once``: copy before ``begin`` returns, because a
    gathered tensor should not stay in memory.
    """

    source: Callable[[], torch.Tensor]
    pieces: Sequence[tuple[int, int]]
    at_once: bool = False


def slots_for(sizes: Sequence[tuple[int, int, torch.dtype]]) -> tuple[list[Slot], list[int]]:
    """Return slots for parts of (words, bytes per word, dtype), and the bytes of each segment."""
    slots: list[Slot] = []
    segments = [0]
    for words, word_bytes, dtype in sizes:
        nbytes = words * word_bytes
        if segments[-1] and segments[-1] + nbytes > SEGMENT_BYTES:
            segments.append(0)
        slots.append(Slot(len(segments) - 1, segments[-1], words, word_bytes, dtype))
        segments[-1] += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return slots, segments


class Room:
    """Memory for all of this rank's parts."""

    def __init__(self, segments: Sequence[int], device: torch.device, *, pinned: bool) -> None:
        self._segments = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for size in segments]

    def tensor(self, slot: Slot) -> torch.Tensor:
        """The part's words, 1-D, with its dtype (complex numbers as pairs of floats)."""
        dtype = torch.float32 if slot.dtype == torch.complex64 else slot.dtype
        whole = self._segments[slot.segment]
        return whole[slot.offset : slot.offset + slot.words * slot.word_bytes].view(dtype)

    def span(self, first: Slot, last: Slot) -> torch.Tensor:
        """All bytes from one part to a later one of the same segment and width, including any gaps, as unsigned bytes
        or signed words.
        """
        whole = self._segments[first.segment]
        return words_of(whole[first.offset : last.offset + last.words * last.word_bytes], first.word_bytes)

    def words(self, slot: Slot) -> npt.NDArray[Any]:
        """The part's words, unsigned: a view if the room is in the host's memory, else a copy."""
        whole = self._segments[slot.segment]
        part = whole[slot.offset : slot.offset + slot.words * slot.word_bytes].cpu()
        words: npt.NDArray[Any] = part.numpy().view(word_dtype(slot.word_bytes))
        return words


class Rooms:
    """Two rooms, each allocated when first needed. ``device``: where they are, or None for the host."""

    def __init__(
        self, slots: Sequence[Slot], segments: Sequence[int], device: torch.device | None, *, pinned: bool
    ) -> None:
        self.slots = slots
        self.device = device
        self._segments = segments
        self._pinned = pinned
        self.previous: Room | None = None
        self._next: Room | None = None
        self._waiting: list[Copy] = []
        self._read: Sequence[Copy] = ()
        """Sources that the device is still reading, and that must not be freed."""
        self._stream: Any = None
        self._event: Any = None

    @property
    def nbytes(self) -> int:
        return sum(self._segments)

    @property
    def next(self) -> Room:
        if self._next is None:
            self._next = self._room()
        return self._next

    def _room(self) -> Room:
        return Room(self._segments, self.device or torch.device("cpu"), pinned=self._pinned)

    def begin(self, copies: Sequence[Copy], cuda: torch.device | None) -> None:
        """Start a snapshot in the free room. ``cuda``: the tensors' CUDA device, or None if they are on the host."""
        if cuda is None:
            for copy in copies:
                if copy.at_once:
                    self._copy(self.next, copy)
            self._waiting = [copy for copy in copies if not copy.at_once]
            return
        self._copy_on_stream(copies, cuda)
        self._read = copies

    def take(self, tensor: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Copy one tensor now. Once this returns, the tensor may be freed or changed. On a device, only work ordered
        after the current stream's may do so.
        """
        copy, near = Copy(lambda: tensor, pieces), tensor.device.type == "cuda"
        device = tensor.device if near else self.device
        if device is None:
            self._copy(self.next, copy)
            return
        event = self._copy_on_stream([copy], device)
        if near:
            torch.cuda.current_stream(device).wait_event(event)
            tensor.record_stream(self._stream)
        else:
            event.synchronize()

    def has(self, tensor: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> bool:
        """Whether the snapshot already has the words that ``take`` would copy."""
        if self._event is not None:
            self._event.synchronize()
        flat = _flat(tensor)
        for number, first in pieces:
            held = self.next.tensor(self.slots[number])
            given = flat[first : first + len(held)].to(held.device, held.dtype)
            if not torch.equal(held.view(torch.uint8), given.view(torch.uint8)):
                return False
        return True

    def _copy_on_stream(self, copies: Sequence[Copy], cuda: torch.device) -> Any:
        if self._stream is None:
            self._stream = torch.cuda.Stream(cuda)
        self._stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(self._stream):
            for copy in copies:
                self._copy(self.next, copy)
            self._event = self._stream.record_event()
        return self._event

    def finish(self) -> None:
        """Finish the copies and return once the tensors may change again."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:
            # Each source may be freed as soon as it is copied.
            self._copy(self.next, waiting.pop())
        if self._event is not None:
            self._event.synchronize()
            self._event, self._read = None, ()

    def on_stream(self) -> Any:
        """Context manager that runs device work on the copy stream, independently of the training's stream."""
        return torch.cuda.stream(self._stream)

    def keep(self) -> None:
        """Make the snapshot the previous state; called once the hub has stored it."""
        self.previous, self._next = self.next, self.previous

    def fill_previous(self, words_of: Callable[[int], npt.NDArray[Any]]) -> None:
        """Fill the previous state with ``words_of(slot number)`` for each slot."""
        room = self._room()
        for number, slot in enumerate(self.slots):
            flat = torch.from_numpy(words_of(number).copy()).view(torch.uint8)
            room.tensor(slot).view(torch.uint8).copy_(flat)
        self.previous = room

    def _copy(self, room: Room, copy: Copy) -> None:
        with torch.no_grad():
            flat = _flat(copy.source())
            for number, first in copy.pieces:
                slot = self.slots[number]
                room.tensor(slot).copy_(flat[first : first + slot.words], non_blocking=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in 1-D, with complex numbers as pairs of floats."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
