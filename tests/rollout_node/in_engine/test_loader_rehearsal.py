"""Verdicts of a rehearsed loader, for each way in which loaders write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from rollout_node.in_engine.loader_recording import Storages, record
from rollout_node.in_engine.loader_rehearsal import LoaderVerdict, StorageSpan, rehearse
from rollout_node.in_engine.weight_audit import compare
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

Load = Callable[[torch.nn.Parameter, torch.Tensor], object]


class One(torch.nn.Module):
    def __init__(self, load: Load, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(shape, device=DEVICE).to(dtype), requires_grad=False)
        self._load = load

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self._load(self.w, tensor)


def doubled(p: torch.nn.Parameter, t: torch.Tensor) -> None:
    p.data.copy_(t)
    p.data.mul_(2)


def composed(p: torch.nn.Parameter, t: torch.Tensor) -> None:
    p.data.copy_(t)
    p.data.copy_(-torch.exp(p.data))


def padded(p: torch.nn.Parameter, t: torch.Tensor) -> None:
    p.data[:3].copy_(t)
    p.data[3:].zero_()


def through_a_buffer(p: torch.nn.Parameter, t: torch.Tensor) -> None:
    buffer = torch.empty_like(p)
    buffer.copy_(t)
    p.data.copy_(buffer * 3)


def checks(p: torch.nn.Parameter, t: torch.Tensor) -> None:
    if float(t.abs().max()) > 5:
        raise ValueError("no such weight")
    p.data.copy_(t)


FOLLOWED: dict[str, tuple[Load, tuple[int, ...]]] = {
    "casts": (lambda p, t: p.data.copy_(t), (4, 3)),
    "computes": (lambda p, t: p.data.copy_(-torch.exp(t)), (4, 3)),
    "broadcasts": (lambda p, t: p.data.copy_(t[:1]), (4, 3)),
    "takes a number": (lambda p, t: p.data.fill_(t[0, 0].item()), (4, 3)),
    "pads": (padded, (3, 3)),
    "joins": (lambda p, t: p.data.copy_(torch.cat([t[2:], t[:2]])), (4, 3)),
    "goes through a buffer": (through_a_buffer, (4, 3)),
    "looks at values": (checks, (4, 3)),
}
LOST: dict[str, Load] = {
    "computes in place": doubled,
    "writes twice": composed,
    "fails": lambda p, t: [][0],
    "writes with an operator of its own": lambda p, t: torch.mul(t.to(p.dtype), 2, out=p.data),
}


@pytest.mark.parametrize("how", FOLLOWED)
def test_rehearsal_detects_one_changed_bit_and_writes_nothing(how: str) -> None:
    load, shape = FOLLOWED[how]
    model = One(load, 4, 3)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    model.load_weights([("w", values)])
    storages, there = Storages(model), model.w.clone()
    verdict, spans = rehearse(model, storages.owns, "w", values)
    assert (verdict, torch.equal(model.w, there)) == (LoaderVerdict.EQUAL, True)
    assert {span[:2] for span in spans} == {StorageSpan.of(model.w)[:2]}
    assert rehearse(model, storages.owns, "w", -values)[0] is LoaderVerdict.DIFFERS
    assert torch.equal(model.w, there)
    for at in range(12):
        words = model.w.data.view(torch.int16).view(-1)
        words[at] ^= 1
        assert rehearse(model, storages.owns, "w", values)[0] is LoaderVerdict.DIFFERS
        words[at] ^= 1


@pytest.mark.parametrize("how", LOST)
def test_unjudgeable_loader_has_no_verdict_and_writes_nothing(how: str) -> None:
    model = One(LOST[how], 4, 3)
    there = model.w.clone()
    assert rehearse(model, Storages(model).owns, "w", torch.full((4, 3), 7.0))[0] is LoaderVerdict.UNKNOWN
    assert torch.equal(model.w, there)


def test_tensor_of_another_rank_is_untouched() -> None:
    model = One(lambda p, t: None, 4, 3)
    assert rehearse(model, Storages(model).owns, "w", torch.zeros(4, 3)) == (LoaderVerdict.UNTOUCHED, [])


def test_nan_values_are_compared_by_bits() -> None:
    model = One(lambda p, t: p.data.copy_(t), 2, 2)
    values = torch.full((2, 2), float("nan"))
    model.load_weights([("w", values)])
    assert rehearse(model, Storages(model).owns, "w", values)[0] is LoaderVerdict.EQUAL


@pytest.mark.parametrize("how", [*FOLLOWED, *LOST])
def test_recording_writes_nothing_and_reaches_every_parameter(how: str) -> None:
    load, shape = FOLLOWED.get(how) or (LOST[how], (4, 3))
    model = One(load, 4, 3)
    there = model.w.clone()
    mapping, _, unreached = record(model, Layout([Tensor("w", "F32", shape)]))
    assert (list(mapping.reload), mapping.blocks) == ([0], {})
    assert unreached == (["w"] if how == "fails" else [])
    assert torch.equal(model.w, there)


def test_verdicts_of_all_ranks_are_combined_for_the_expected_values() -> None:
    layout = Layout([Tensor("a", "F32", (4,))])
    expected = {0: 77}

    def compared(*entries: tuple[int, int]) -> tuple[list[str], list[str]]:
        return compare(layout, [(0, verdict, (), (), seen) for verdict, seen in entries], expected)

    equal, differs, unknown = int(LoaderVerdict.EQUAL), int(LoaderVerdict.DIFFERS), int(LoaderVerdict.UNKNOWN)
    assert compared((equal, 77), (equal, 77)) == ([], [])
    assert compared((equal, 77), (differs, 77)) == (["a"], [])
    assert compared((equal, 77), (unknown, 77)) == ([], ["a"])
    assert compared((equal, 77), (equal, 78)) == ([], ["a"])
    assert compared((differs, 78)) == ([], ["a"])
    assert compared() == ([], ["a"])
    assert compare(layout, [(0, equal, (), (), 77), (0, 0, (2,), (1,), 5)], expected) == ([], ["a"])
