"""Installing into a toy model whose loader fuses, shards, transposes, pads, casts and computes as vLLM's loaders do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from rollout_node.in_engine.installation import DerivedParts, Installation
from rollout_node.in_engine.loader_recording import record
from rollout_node.in_engine.weight_audit import compare, digests
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {
    "embed": ("BF16", (10, 8)),
    "q": ("BF16", (8, 8)),
    "k": ("BF16", (4, 8)),
    "down": ("BF16", (8, 12)),
    "transposed": ("BF16", (6, 4)),
    "norm": ("F32", (8,)),
    "scale": ("F32", (1,)),
    "cast": ("F32", (5, 3)),
    "decay": ("F32", (7,)),
    "unused": ("BF16", (3,)),
}


class Toy(torch.nn.Module):
    """Rank ``rank`` of two: ``down`` is cut by columns, other parameters are replicated."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

        def parameter(*shape: int, dtype: torch.dtype = BF16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)

        self.embed, self.qk, self.down = parameter(16, 8), parameter(12, 8), parameter(8, 6)
        self.transposed, self.norm, self.scale = parameter(4, 6), parameter(8, dtype=F32), parameter(1, dtype=F32)
        self.cast, self.decay = parameter(5, 3), parameter(7, dtype=F32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == "embed":
                self.embed.data[:10].copy_(w)
                self.embed.data[10:].fill_(0)
            elif name in ("q", "k"):
                self.qk.data.narrow(0, 0 if name == "q" else 8, w.shape[0]).copy_(w.contiguous())
            elif name == "down":
                self.down.data.copy_(w.narrow(1, 6 * self.rank, 6).to(self.down.device))
            elif name == "transposed":
                self.transposed.data[:] = w.t()
            elif name == "scale":
                self.scale.data.fill_(w.item())
            elif name in ("norm", "cast"):
                getattr(self, name).data.copy_(w)
            elif name == "decay":
                self.decay.data.copy_(-torch.exp(w))


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    return {n: p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for n, p in model.named_parameters()}


def loaded(run: Any, rank: int = 0) -> Toy:
    """The model of a freshly started engine."""
    from safetensors.torch import load_file

    toy = Toy(rank).to(DEVICE)
    toy.load_weights(load_file(run.shadow.path).items())
    return toy


def never() -> bool:
    return False


@pytest.fixture
def run(make_run: Callable[..., Any]) -> Any:
    layout = Layout([Tensor(n, d, s) for n, (d, s) in SHAPES.items()], cell_words=23)
    values = np.random.default_rng(0).standard_normal(layout.nbytes // 2).astype(np.float32)
    state = torch.from_numpy(values).to(BF16).view(torch.uint8).numpy()[: layout.nbytes].copy()
    return make_run(layout, state)


@pytest.fixture
def there(run: Any) -> tuple[Toy, Installation]:
    toy = Toy().to(DEVICE)
    installation = Installation(toy, run.layout)
    go(installation, run)
    return toy, installation


def go(installation: Installation, run: Any) -> str:
    how = installation.prepare(run.files, run.version, never)
    assert how is not None
    installation.commit(run.version)
    return str(how["install"])


def test_recording_writes_nothing_and_finds_transformed_tensors(run: Any) -> None:
    toy = Toy().to(DEVICE)
    before = bits(toy)
    mapping, storages, unreached = record(toy, run.layout)
    assert bits(toy) == before
    reasons = {run.layout.tensors[n].name: why for n, why in mapping.reload.items()}
    assert set(reasons) == {"cast", "decay", "scale"}
    assert "casts" in reasons["cast"]
    assert "computes" in reasons["decay"]
    assert unreached == []
    assert len(storages.fills) == 1
    assert run.layout.numbers["unused"] not in mapping.blocks


@pytest.mark.parametrize("rank", [0, 1])
def test_dense_and_sparse_installs_equal_a_fresh_engine(run: Any, rank: int) -> None:
    toy = Toy(rank).to(DEVICE)
    pointers = [p.data_ptr() for p in toy.parameters()]
    installation = Installation(toy, run.layout)
    assert go(installation, run) == "dense"
    assert bits(toy) == bits(loaded(run, rank))
    for seed in range(5):
        run.step(seed, share=0.2)
        assert go(installation, run) == "sparse"
        assert bits(toy) == bits(loaded(run, rank))
        assert installation.held == run.version
    run.step(7)
    run.step(8)
    run.step(9)
    assert go(installation, run) == "sparse"
    assert bits(toy) == bits(loaded(run, rank))
    assert [p.data_ptr() for p in toy.parameters()] == pointers


def test_prepare_writes_nothing_and_abort_restores(run: Any, there: tuple[Toy, Installation]) -> None:
    toy, installation = there
    first, before = installation.held, bits(toy)
    run.step(1, share=0.3)
    assert installation.prepare(run.files, run.version, never) is not None
    assert bits(toy) == before
    installation.commit(run.version)
    assert bits(toy) != before
    assert not installation.abort()  # tensors installed by the loader can't be restored ...
    assert installation.held is None  # ... so the rank holds no version
    assert go(installation, run) == "dense"
    assert bits(toy) == bits(loaded(run))
    assert first is not None


def test_chain_is_undone_value_by_value(make_run: Callable[..., Any]) -> None:
    layout = Layout([Tensor(n, *SHAPES[n]) for n in ("embed", "q", "k", "down", "transposed", "norm")], cell_words=23)
    run = make_run(layout, np.random.default_rng(3).integers(0, 255, layout.nbytes, dtype=np.uint8))

    class Plain(Toy):
        def __init__(self) -> None:
            super().__init__()
            del self.scale, self.cast, self.decay

    toy = Plain().to(DEVICE)
    installation = Installation(toy, layout)
    go(installation, run)
    installation.finish()
    first, before = installation.held, bits(toy)
    for seed in (1, 2, 3):
        run.step(seed, share=0.5)
    go(installation, run)
    assert bits(toy) != before
    assert installation.abort()
    assert (installation.held, bits(toy)) == (first, before)
    go(installation, run)
    installation.finish()
    assert installation.abort()  # finished: a later abort undoes nothing
    assert installation.held == run.version


def test_failed_write_is_rolled_back(
    run: Any, there: tuple[Toy, Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, installation = there
    run.step(1, share=0.3)
    how = installation.prepare(run.files, run.version, never)
    assert how is not None
    assert installation._prepared is not None
    installation._prepared.whole = []
    before, held = bits(toy), installation.held
    chunk = installation._prepared.staged.chunks[-1]
    wrong = type(chunk)(chunk.storage, chunk.where, chunk.new[:-1], chunk.old)  # one value short: torch raises
    installation._prepared.staged.chunks[-1] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        installation.commit(run.version)
    assert (bits(toy), installation.held) == (before, held)


def test_foreign_edits_are_detected_before_the_next_commit(run: Any, there: tuple[Toy, Installation]) -> None:
    toy, installation = there
    with torch.no_grad():
        toy.qk.add_(1.0)
    run.step(4, share=1.0)
    with pytest.raises(IntegrityError, match="live values"):
        installation.prepare(run.files, run.version, never)
    assert installation.held is None
    assert go(installation, run) == "dense"
    assert bits(toy) == bits(loaded(run))


def test_rebound_parameters_are_detected(run: Any, there: tuple[Toy, Installation]) -> None:
    toy, installation = there
    toy.qk.data = toy.qk.data.clone()
    installation.check_storages()
    assert installation.held is None
    assert go(installation, run) == "dense"
    assert bits(toy) == bits(loaded(run))


def test_commit_without_prepare_is_refused(run: Any, there: tuple[Toy, Installation]) -> None:
    _, installation = there
    with pytest.raises(LocalError, match="isn't prepared"):
        installation.commit(Version(0, 9))


def test_gap_in_the_chain_is_refused(run: Any, there: tuple[Toy, Installation]) -> None:
    toy, installation = there
    before = bits(toy)
    first = run.step(1)
    second = run.step(2)
    run.serve = [run.shadow.patch_path(second)]
    with pytest.raises(IntegrityError, match="patch against"):
        installation.prepare(run.files, second, never)
    run.serve = [run.shadow.patch_path(first)]
    with pytest.raises(IntegrityError, match="end at"):
        installation.prepare(run.files, second, never)
    assert (bits(toy), installation.held) == (before, Version(0, 0))


def test_model_with_parameters_outside_the_layout_is_refused(run: Any) -> None:
    class Larger(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
            del self.scale, self.cast, self.decay

    layout = Layout([Tensor(n, *SHAPES[n]) for n in ("embed", "q", "k", "down", "transposed", "norm")])
    with pytest.raises(IntegrityError, match=r"reaches 1 .*extra"):
        Installation(Larger().to(DEVICE), layout)


def test_audit_sums_ranks_and_counts_replicas_once(run: Any) -> None:
    run.step(5)
    ranks = [loaded(run, rank) for rank in (0, 1)]
    maps = [record(toy, run.layout)[:2] for toy in ranks]
    entries = [e for mapping, storages in maps for e in digests(run.layout, mapping, storages)]
    wrong, unknown = compare(run.layout, entries, run.digests)
    assert wrong == []
    assert set(unknown) == {"cast", "decay", "scale", "unused"}
    with torch.no_grad():
        ranks[1].down[3, 3] += 1
        ranks[1].norm[3] += 1  # a replica alone: the ranks disagree
    entries = [e for mapping, storages in maps for e in digests(run.layout, mapping, storages)]
    assert compare(run.layout, entries, run.digests)[0] == ["norm", "down"]
    one = digests(run.layout, *maps[0])
    assert "down" in compare(run.layout, one, run.digests)[1]


def test_models_with_derived_parts_are_installed_whole(run: Any) -> None:
    installation = Installation(Toy().to(DEVICE), run.layout, DerivedParts(["experts: reordered"], pytest.fail))
    installation.held = run.version
    run.step(1)
    how = installation.prepare(run.files, run.version, never)
    assert how is not None
    assert how["install"] == "dense"
