"""Every tensor of a run is accounted for: reached, the twin of another, skipped by a rule, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError, LocalError, RemoteError
from rollout_node.in_engine.installation import DerivedParts, Installation
from rollout_node.in_engine.tensor_accounts import Account, pack, skipped, together
from rollout_node.in_engine.weight_audit import compare
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

EMBEDDING, HEAD = "model.embed.weight", "head.weight"


class Tied(torch.nn.Module):
    """The head is the embedding. ``reads_head``: the loader writes both tensors to it, the later one last."""

    def __init__(self, *, reads_head: bool = False, casts: bool = False) -> None:
        super().__init__()
        self.reads_head = reads_head
        self.model, self.head = torch.nn.Module(), torch.nn.Module()
        dtype = torch.float32 if casts else torch.bfloat16
        self.model.embed = torch.nn.Module()
        self.model.embed.weight = torch.nn.Parameter(torch.randn(12, 8).to(dtype), requires_grad=False)
        self.head.weight = self.model.embed.weight
        self.norm = torch.nn.Parameter(torch.randn(8), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == EMBEDDING or (name == HEAD and self.reads_head):
                self.head.weight.data[:10].copy_(w)
            elif name == "norm":
                self.norm.data.copy_(w)


def layout(*more: Tensor, head: bool = True) -> Layout:
    heads = [Tensor(HEAD, "BF16", (10, 8))] if head else []
    return Layout([Tensor(EMBEDDING, "BF16", (10, 8)), Tensor("norm", "F32", (8,)), *heads, *more], cell_words=23)


def state(of: Layout, *, equal: bool) -> np.ndarray:
    """``equal``: the head has the embedding's bits."""
    words = np.random.default_rng(0).standard_normal(of.nbytes // 4).astype(np.float32).view(np.uint8)
    if equal and HEAD in of.numbers:
        head, embedding = (of.offsets[of.numbers[name]] for name in (HEAD, EMBEDDING))
        words[head : head + 160] = words[embedding : embedding + 160]
    return words


def never() -> bool:
    return False


def install(installation: Installation, run: Any) -> None:
    assert installation.prepare(run.files, run.version, never) is not None
    installation.commit(run.version)


def audit(installation: Installation, run: Any) -> tuple[list[str], list[str]]:
    return compare(run.layout, installation.audit(run.files, run.version, never), run.digests)


@pytest.fixture
def stored(make_run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda of, *, equal=True: make_run(of, state(of, equal=equal))


def twins(installation: Installation) -> set[frozenset[str]]:
    names = [t.name for t in installation.layout.tensors]
    return {frozenset({names[n], names[twin]}) for n, twin in installation.mapping.twins.items()}


@pytest.mark.parametrize("how", [{}, {"reads_head": True}, {"casts": True}], ids=str)
def test_a_tied_engine_takes_equal_tensors_alone(stored: Any, how: dict[str, bool]) -> None:
    """The loader may skip the head, write it where it writes the embedding, or cast."""
    run = stored(layout())
    installation = Installation(Tied(**how).to(DEVICE), run.layout)
    assert twins(installation) == {frozenset({EMBEDDING, HEAD})}
    assert set(installation.accounts(())) == {Account.COVERED}
    install(installation, run)
    assert audit(installation, run) == ([], [])
    run.flip(HEAD, EMBEDDING)
    install(installation, run)
    assert audit(installation, run) == ([], [])
    before = installation._model.head.weight.clone(), run.version
    for name in (HEAD, EMBEDDING):  # each differs from the other then
        run.flip(name)
        with pytest.raises(LocalError, match=rf"{run.version} is refused: its .* differs from its .*\(tied\)"):
            installation.prepare(run.files, run.version, never)
        with pytest.raises(LocalError, match="tied"):
            installation.prepare(run.files, run.version, never, whole=True)
        assert torch.equal(installation._model.head.weight, before[0])
        assert installation.held == before[1]
        run.flip(*{HEAD, EMBEDDING} - {name})
        assert installation.prepare(run.files, run.version, never) is not None
        run.flip(HEAD, EMBEDDING)
    install(installation, run)
    assert audit(installation, run) == ([], [])
    with torch.no_grad():
        installation._model.head.weight[3, 3] += 1
    assert {*audit(installation, run)[0]} == {EMBEDDING, HEAD}


def test_a_tied_engine_that_is_loaded_whole_takes_equal_tensors_alone(stored: Any) -> None:
    run = stored(layout(), equal=False)
    installation = Installation(Tied().to(DEVICE), run.layout, DerivedParts(["experts: reordered"], pytest.fail))
    with pytest.raises(LocalError, match="tied"):
        installation.prepare(run.files, run.version, never)


def test_tensors_that_overlap_in_part_are_refused(stored: Any) -> None:
    """The order of the loader's writes would decide."""

    class Overlapping(Tied):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, w in weights:
                if name == "norm":
                    self.norm.data.copy_(w)
                elif name in (EMBEDDING, HEAD):
                    self.head.weight.data[0 if name == HEAD else 2 :][:10].copy_(w)

    with pytest.raises(IntegrityError, match="several tensors fill the same elements"):
        Installation(Overlapping().to(DEVICE), layout())


def test_a_tensor_without_a_way_into_the_engine_is_unknown(stored: Any) -> None:
    of = layout(
        Tensor("extra.weight", "BF16", (3,)), Tensor("l.rotary_emb.inv_freq", "F32", (4,)), Tensor("e", "U8", (0,))
    )
    accounts = Installation(Tied().to(DEVICE), of).accounts(())
    found = dict(zip((t.name for t in of.tensors), accounts, strict=True))
    assert found.pop("extra.weight") is Account.UNKNOWN
    assert found.pop("l.rotary_emb.inv_freq") is Account.SKIPPED
    assert set(found.values()) == {Account.COVERED}


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("transformer.h.0.attn.masked_bias", True),
        ("h.0.attn.bias", True),
        ("model.vision.position_ids", True),
        ("model.layers.3.self_attn.k_proj.k_scale", True),
        ("mtp.layers.0.mlp.gate_proj.weight", True),
        ("model.mtp_layers.0.mlp.gate_proj.weight", True),
        ("model.layers.61.embed_tokens.weight", True),  # a draft layer
        ("model.visual.blocks.0.attn.qkv.weight", True),  # the engine has no such part
        ("model.audio_tower.conv1.weight", False),  # the engine has one, and does not read this tensor
        ("model.layers.60.mlp.gate_proj.weight", False),
        ("model.layers.3.self_attn.q_proj.bias", False),
        ("lm_head.weight", False),
        ("score.weight", False),
    ],
)
def test_rules_name_the_tensors_that_change_no_answer(name: str, left_out: bool) -> None:
    assert skipped(name, {"model", "audio_tower", "layers"}, 61) == left_out


def test_ranks_account_for_a_tensor_together() -> None:
    first, last = (
        [Account.COVERED, Account.UNKNOWN, Account.SKIPPED],
        [Account.UNKNOWN, Account.UNKNOWN, Account.COVERED],
    )
    both = [Account.COVERED, Account.UNKNOWN, Account.COVERED]
    assert together([pack(first), pack(last)], 3) == both
    for wrong in (pack(first[:2]), pack([*first, Account.COVERED])):
        with pytest.raises(RemoteError, match="3 tensors"):
            together([pack(first), wrong], 3)
