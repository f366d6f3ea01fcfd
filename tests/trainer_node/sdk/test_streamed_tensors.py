"""Tensors of an iterator: each is copied as it comes, with the same result and the same errors as all at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import UsageError
from tests.support.tensor_device import CUDA, DEVICE
from trainer_node.sdk.publisher import _device
from trainer_node.sdk.shards import LocalShard, dealt
from trainer_node.sdk.snapshot import Rooms, slots_for
from trainer_node.sdk.streamed_tensors import StreamedTensors, on_host
from trainer_node.sdk.tensors import DTYPES, TORCH_DTYPES, ExpectedTensors, LiveTensor, fit, named

pytestmark = pytest.mark.device


class Taken:
    """One rank's snapshot of streamed tensors, beside that of other ranks."""

    def __init__(self, known: list[ExpectedTensors], rank: int = 0, ranks: int = 1) -> None:
        layout = Layout(known[0].tensors.values())
        parts = dealt(layout, [LocalShard(tuple(range(ranks)))] * len(layout.tensors), rank)
        dtypes = [TORCH_DTYPES[layout.tensors[p.cell.tensor].dtype] for p in parts]
        self.rooms = Rooms(
            *slots_for([(p.cell.words, p.cell.word_bytes, d) for p, d in zip(parts, dtypes, strict=True)]),
            CUDA,
            pinned=False,
        )
        self.places = [(layout.tensors[p.cell.tensor].name, p.cell.start + p.at) for p in parts]
        pieces: dict[str, Any] = {}
        for number, (name, _) in enumerate(self.places):
            pieces.setdefault(name, []).append((number, parts[number].source))
        self.streamed = StreamedTensors(self.rooms, pieces, known)

    def stream(self, tensors: Any) -> None:
        for one in named(tensors):
            self.streamed.take(one)
        self.streamed.finish()
        self.rooms.finish()

    def check(self, truth: dict[str, torch.Tensor]) -> None:
        for slot, (name, first) in zip(self.rooms.slots, self.places, strict=True):
            whole = truth[name].cpu().reshape(-1)
            flat = torch.view_as_real(whole).reshape(-1) if whole.is_complex() else whole
            held = self.rooms.next.tensor(slot).cpu()
            assert torch.equal(held.view(torch.uint8), flat[first : first + len(held)].view(torch.uint8)), name


def table(tensors: dict[str, torch.Tensor], where: str = "the base") -> ExpectedTensors:
    return ExpectedTensors.of(where, [Tensor(n, DTYPES[t.dtype], tuple(t.shape)) for n, t in tensors.items()])


def state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = {
        f"{name.lower()}.{number}": torch.randint(0, 256, (number * 7 + dtype.itemsize,), generator=draw)
        .to(torch.uint8)
        .repeat(dtype.itemsize)
        .view(dtype)
        .to(DEVICE)
        for dtype, name in DTYPES.items()
        if dtype is not torch.bool
        for number in (1, 90)
    }
    return made | {
        "bool": torch.tensor([True, False, True], device=DEVICE),
        "matrix": torch.randn(33, 65, generator=draw).to(DEVICE),
        "scalar": torch.tensor(0.5, device=DEVICE),
        "nothing": torch.zeros(0, 4, device=DEVICE),
    }


def test_every_dtype_keeps_its_bits() -> None:
    tensors = state()
    taken = Taken([table(tensors)])
    taken.stream(tensors)
    taken.check(tensors)


@pytest.mark.parametrize("rank", range(3))
def test_each_of_several_ranks_copies_its_share(rank: int) -> None:
    tensors = state()
    taken = Taken([table(tensors)], rank, 3)
    taken.stream(reversed(tensors.items()))
    taken.check(tensors)


def test_masters_are_rounded_and_a_buffer_may_be_used_again() -> None:
    draw = torch.Generator().manual_seed(1)
    masters = {f"layer.{n}": torch.randn(300, 20, generator=draw).to(DEVICE) for n in range(5)}
    published = {name: tensor.to(torch.bfloat16) for name, tensor in masters.items()}
    buffer = torch.empty(300, 20, device=DEVICE)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in masters.items():
            yield name, buffer.copy_(tensor)

    taken = Taken([table(published)])
    taken.stream(gathered())
    taken.check(published)


def test_no_tensor_is_kept_when_the_next_one_is_asked_for() -> None:
    tensors = {f"layer.{n}": torch.full((10,), float(n)) for n in range(4)}
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            one = tensor.clone()
            alive.append(weakref.ref(one))
            gone = one.detach()
            del one
            yield name, gone
            del gone
            gc.collect()
            assert alive[-1]() is None

    taken = Taken([table(tensors)])
    taken.stream(gathered())
    taken.check(tensors)
    assert len(alive) == 4


def wrong() -> dict[str, tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor]]]:
    """The tensors that an iterator gives, and the state that is expected."""
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    return {
        "missing": ([("a", a)], {"a": a, "b": b}),
        "unexpected": ([("a", a), ("c", b.clone()), ("b", b)], {"a": a, "b": b}),
        "shape": ([("a", a.reshape(3, 2)), ("b", b)], {"a": a, "b": b}),
        "kind": ([("a", a.to(torch.int32)), ("b", b)], {"a": a, "b": b}),
        "twice": ([("a", a), ("a", a + 1), ("b", b)], {"a": a, "b": b}),
        "meta": ([("a", a.to("meta")), ("b", b)], {"a": a, "b": b}),
        "sparse": ([("a", a.to_sparse()), ("b", b)], {"a": a, "b": b}),
        "all": ([("a", a.reshape(6)), ("d", a + 1)], {"a": a, "b": b}),
    }


@pytest.mark.parametrize("case", wrong())
def test_differences_are_listed_as_for_tensors_that_come_at_once(case: str) -> None:
    given, expected = wrong()[case]
    known = [table(expected), table(expected | {"e": torch.ones(2)}, "the hub's newest version 0.1")]
    with pytest.raises(UsageError) as at_once:
        fit(list(named(given)), known, torch.bfloat16)
    with pytest.raises(UsageError) as one_by_one:
        Taken(known).stream(given)
    assert str(one_by_one.value) == str(at_once.value)


@pytest.mark.parametrize("first", ["embed", "head"])
def test_a_tied_tensor_in_no_table_is_dropped(first: str) -> None:
    embed = torch.randn(6, 4, dtype=torch.float32)
    both = {"embed": embed, "head": embed.clone()}
    known = [table({"embed": embed.to(torch.bfloat16)})]
    taken = Taken(known)
    taken.stream(sorted(both.items(), key=lambda item: item[0] != first))
    taken.check({"embed": embed.to(torch.bfloat16)})
    with pytest.raises(UsageError, match="unexpected: head"):
        Taken(known).stream({"embed": embed, "head": embed + 1})
    with pytest.raises(UsageError, match="unexpected: other"):
        Taken([table({"ones": torch.ones(4, 4)})]).stream({"ones": torch.ones(4, 4), "other": torch.ones(4, 4)})


def test_a_tensor_that_comes_twice_with_equal_values_is_taken_once() -> None:
    a = torch.randn(5, 5)
    taken = Taken([table({"a": a})])
    taken.stream([("a", a), ("a", a.clone())])
    taken.check({"a": a})


def test_shards_are_refused(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    shard = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(UsageError, match="a: is a DTensor; the iterator has to give whole tensors"):
        Taken([table({"a": torch.ones(4, 4)})]).stream({"a": shard})


def test_tensors_on_several_devices_are_refused() -> None:
    def on(*names: str) -> list[Any]:
        return [SimpleNamespace(tensor=SimpleNamespace(device=torch.device(name))) for name in names]

    assert _device(on("cpu")) is None
    assert _device(on("cpu", "cuda:1", "cuda:1")) == torch.device("cuda:1")
    with pytest.raises(UsageError, match="tensors lie on cuda:0, cuda:1"):
        _device(on("cuda:1", "cpu", "cuda:0"))


def test_a_collected_tensor_has_memory_of_its_own() -> None:
    one = LiveTensor("a", torch.ones(3))
    kept = on_host(one)
    one.tensor.zero_()
    assert kept.tensor.tolist() == [1, 1, 1]


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
