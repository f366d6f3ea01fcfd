"""Recording of loaders that do more than copy one tensor to one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from rollout_node.in_engine.loader_recording import record
from rollout_node.in_engine.weight_mapping import Mapping
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

Tensors = Iterable[tuple[str, torch.Tensor]]
LAYOUT = Layout([Tensor(name, "BF16", (2, 3)) for name in ("a", "b", "c")])
A, B, C = range(3)


class Two(torch.nn.Module):
    """``ab`` is loaded from a and b, ``c`` from c."""

    def __init__(self, load: Callable[[Two, Tensors], object]) -> None:
        super().__init__()
        self.ab = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
        self.c = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
        self.calls = 0
        self._load = load

    def load_weights(self, weights: Tensors) -> None:
        self.calls += 1
        self._load(self, weights)


def plain(model: Two, weights: Tensors) -> None:
    for name, w in weights:
        {"a": model.ab.data[:2], "b": model.ab.data[2:], "c": model.c.data}[name].copy_(w)


def then(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Two, Tensors], None]:
    def changed(weights: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for name, w in weights:
            yield name, change(name, w)

    return lambda model, weights: plain(model, changed(weights))


def joins_by_cat(model: Two, weights: Tensors) -> None:
    found = dict(weights)
    if "c" in found:
        model.c.data.copy_(found["c"])
    if {"a", "b"} <= found.keys():
        model.ab.data.copy_(torch.cat([found["a"], found["b"]]))


def joins_in_a_buffer(model: Two, weights: Tensors) -> None:
    """``a`` alone is written to the parameter too; only the use of ``b`` shows that more is needed."""
    buffer = None
    for name, w in weights:
        if name == "c":
            model.c.data.copy_(w)
        elif name == "a":
            buffer = w.new_empty(4, 3)
            buffer[:2].copy_(w)
            model.ab.data.copy_(buffer)
        elif buffer is not None:
            buffer[2:].copy_(w)
            model.ab.data.copy_(buffer)


def record_with(load: Callable[[Two, Tensors], object]) -> tuple[Two, Mapping, list[str]]:
    model = Two(load)
    mapping, _, unreached = record(model, LAYOUT)
    assert all(bool((p == 1).all()) for p in model.parameters())
    return model, mapping, unreached


def test_copying_loader_is_called_once() -> None:
    model, mapping, unreached = record_with(plain)
    assert (model.calls, set(mapping.blocks), mapping.reload, unreached) == (1, {A, B, C}, {}, [])


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w + 1,
        lambda w: w.flip(0),
        lambda w: torch.cat([w[1:], w[:1]]),
        lambda w: w.float().to(torch.bfloat16),
        lambda w: w.mul_(2),
        lambda w: torch.empty_like(w).copy_(w),
        lambda w: w[:1],
    ],
)
def test_transforming_one_tensor_leaves_the_others_mapped(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, mapping, unreached = record_with(then(lambda name, w: change(w) if name == "b" else w))
    assert (model.calls, set(mapping.blocks), set(mapping.reload), unreached) == (1, {A, C}, {B}, [])


def reads_values_of_b(name: str, w: torch.Tensor) -> torch.Tensor:
    return w * w.sum().item() if name == "b" else w


def test_loader_that_reads_values_is_called_for_each_tensor() -> None:
    model, mapping, unreached = record_with(then(reads_values_of_b))
    assert (set(mapping.blocks), set(mapping.reload), unreached) == ({A, C}, {B}, [])
    assert model.calls == 1 + 3 + 1


@pytest.mark.parametrize("load", [joins_by_cat, joins_in_a_buffer])
def test_joined_tensors_are_not_taken_for_unused(load: Callable[[Two, Tensors], object]) -> None:
    _, mapping, unreached = record_with(load)
    assert C in mapping.blocks
    assert any("tensor b" in name for name in unreached)


def test_views_alone_do_not_make_a_tensor_used() -> None:
    def load(model: Two, weights: Tensors) -> None:
        plain(model, ((name, w) for name, w in ((name, w.t().contiguous().t()) for name, w in weights) if name != "b"))

    model, mapping, unreached = record_with(load)
    assert (model.calls, set(mapping.blocks), mapping.reload, unreached) == (1, {A, C}, {}, [])
