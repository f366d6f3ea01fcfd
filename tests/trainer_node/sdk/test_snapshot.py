"""Snapshots: exact casts, bits kept, two rooms that take turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tensor_device import CUDA, DEVICE
from trainer_node.sdk import snapshot
from trainer_node.sdk.snapshot import Copy, Rooms, slots_for

pytestmark = pytest.mark.device


@pytest.fixture(params=["gpu", "cpu"] if CUDA else ["cpu"])
def made(request):
    """Makes rooms on the device, or in the host's memory, for tensors on the device."""
    on_device = request.param == "gpu"
    return lambda slots, segments: Rooms(
        slots, segments, DEVICE if on_device else None, pinned=CUDA is not None and not on_device
    )


@pytest.fixture
def taken(made):
    return lambda source, dtype, cut=1000: taken_in(made, source.to(DEVICE), dtype, cut)


def taken_in(made, source: torch.Tensor, dtype: torch.dtype, cut: int) -> np.ndarray:
    """The words that a snapshot of ``source`` as ``dtype`` has, taken in pieces of ``cut`` words."""
    total = source.numel() * (2 if dtype == torch.complex64 else 1)
    width = 4 if dtype == torch.complex64 else dtype.itemsize
    sizes = [(min(cut, total - at), width, dtype) for at in range(0, total, cut)]
    slots, segments = slots_for(sizes)
    rooms = made(slots, segments)
    rooms.begin([Copy(lambda: source, [(k, k * cut) for k in range(len(slots))])], CUDA)
    rooms.finish()
    return np.concatenate([rooms.next.words(slot) for slot in slots]) if slots else np.empty(0)


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy()


def test_masters_round_as_torch_rounds(taken):
    """Every kind of float32 but NaN, ties to even among them."""
    patterns = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32).view(torch.float32)
    ties = (torch.arange(0, 1 << 16, dtype=torch.int64) << 16 | 0x8000).to(torch.int32).view(torch.float32)
    for source in (patterns, ties):
        numbers = source[~source.isnan()]
        assert (taken(numbers, torch.bfloat16).view(np.uint8) == bits(numbers.to(torch.bfloat16))).all()
        assert (
            torch.from_numpy(taken(source[source.isnan()], torch.bfloat16).view(np.int16).copy())
            .view(torch.bfloat16)
            .isnan()
            .all()
        )


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.float64, torch.int64, torch.complex64],
)
def test_without_a_cast_every_bit_stays(taken, dtype):
    """NaNs with payloads, infinities, -0.0: random bytes hold them all."""
    raw = torch.from_numpy(np.frombuffer(np.random.default_rng(0).bytes(80_000), np.uint8).copy())
    source = raw.view(dtype)
    assert (taken(source, dtype).view(np.uint8) == raw.numpy()).all()


def test_all_bf16_patterns_stay(taken):
    source = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert (taken(source, torch.bfloat16, cut=4096) == np.arange(1 << 16, dtype=np.uint16)).all()


def test_strides_and_shapes_do_not_matter(taken):
    source = torch.randn(13, 7, 5).permute(2, 0, 1)[:, ::2]
    assert (taken(source, torch.float32, cut=11).view(np.uint8) == bits(source)).all()
    assert taken(torch.zeros(0, 3), torch.float32).size == 0
    assert (
        taken(torch.tensor(2.5), torch.bfloat16).view(np.uint8) == bits(torch.tensor(2.5, dtype=torch.bfloat16))
    ).all()
    conjugate = torch.randn(9, dtype=torch.complex64).conj()
    assert (taken(conjugate, torch.complex64, cut=5).view(np.uint8) == bits(conjugate.resolve_conj())).all()


def test_rooms_take_turns(monkeypatch, made):
    monkeypatch.setattr(snapshot, "SEGMENT_BYTES", 100)
    slots, segments = slots_for([(30, 2, torch.bfloat16)] * 3)
    assert [s.segment for s in slots] == [0, 1, 2]
    rooms = made(slots, segments)
    source = torch.zeros(90, device=DEVICE)
    copies = [Copy(lambda: source, [(0, 0), (1, 30), (2, 60)])]

    def step(value: float) -> None:
        source.fill_(value)
        rooms.begin(copies, CUDA)
        rooms.finish()

    def held(room):
        return {float(v) for slot in slots for v in room.tensor(slot)}

    def place(room):
        return room.tensor(slots[0]).data_ptr()

    step(1)
    assert rooms.previous is None
    rooms.keep()
    step(2)
    assert (held(rooms.previous), held(rooms.next)) == ({1}, {2})
    places = {place(rooms.previous), place(rooms.next)}
    # Not kept: the previous state stays, and the next snapshot takes the same room again.
    step(3)
    assert (held(rooms.previous), held(rooms.next)) == ({1}, {3})
    rooms.keep()
    step(4)
    assert (held(rooms.previous), held(rooms.next)) == ({3}, {4})
    assert {place(rooms.previous), place(rooms.next)} == places


def test_gathered_tensors_are_copied_before_begin_returns(made):
    slots, segments = slots_for([(4, 4, torch.float32)] * 2)
    rooms = made(slots, segments)
    now, later = torch.ones(4), torch.ones(4)
    rooms.begin([Copy(lambda: now, [(0, 0)], at_once=True), Copy(lambda: later, [(1, 0)])], None)
    now.zero_()
    rooms.finish()
    assert rooms.next.tensor(slots[0]).tolist() == [1] * 4
    assert rooms.next.tensor(slots[1]).tolist() == [1] * 4


def test_a_previous_state_from_elsewhere(made):
    slots, segments = slots_for([(5, 2, torch.bfloat16), (3, 4, torch.float32)])
    rooms = made(slots, segments)
    words = [np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.uint32)]
    rooms.fill_previous(lambda number: words[number])
    assert rooms.previous is not None
    assert [list(rooms.previous.words(slot)) for slot in slots] == [list(w) for w in words]
