"""Evidence of ranks about their weights, on a toy model of two ranks: ``down`` is cut by columns, ``norm``
replicated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from rollout_node.in_engine import staged_version
from rollout_node.in_engine.install_proof import equal_elements, mapped_elements, mark
from rollout_node.in_engine.installation import Installation
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.weight_audit import compare
from tests.support.tensor_device import DEVICE

pytestmark = pytest.mark.device


class Toy(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.down = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16, device=DEVICE), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(9, device=DEVICE), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            if name == "down":
                self.down.data.copy_(w.narrow(1, 6 * self.rank, 6))
            else:
                self.norm.data.copy_(w)


def never() -> bool:
    return False


@pytest.fixture
def run(make_run: Callable[..., Any]) -> Any:
    layout = Layout([Tensor("down", "BF16", (8, 12)), Tensor("norm", "F32", (9,))], cell_words=50)
    return make_run(layout, np.random.default_rng(3).integers(0, 255, layout.nbytes, dtype=np.uint8))


@pytest.fixture
def ranks(run: Any) -> list[Installation]:
    """Two ranks at the first version."""
    found = [Installation(Toy(rank), run.layout) for rank in (0, 1)]
    for rank in found:
        prepared = rank.prepare(run.files, run.version, never)
        assert prepared is not None
        assert rank.commit(run.version) == prepared["mark"] == mapped_elements(rank.mapping)
    return found


def step(run: Any, share: float = 0.4) -> None:
    """A version that changes both tensors."""
    while True:
        run.step(run.version.step + 1, share=share)
        changed = {run.layout.cells[c.cell].tensor for c in _patch(run).cells}
        if changed == {0, 1} and len(_patch(run).cells) == len(run.layout.cells):
            return


def _patch(run: Any) -> Any:
    from p2pcast.state.patch_file import PatchFile

    return PatchFile.open(run.shadow.patch_path(run.version), run.layout)


def wrong(run: Any, reports: list[dict[str, Any]]) -> list[str]:
    entries = [entry for report in reports for entry in report["grown"]]
    assert reports[0]["expected"] == reports[1]["expected"]
    return compare(run.layout, entries, dict(reports[0]["expected"]))[0]


def prepare(run: Any, ranks: list[Installation]) -> list[dict[str, Any]]:
    reports = [rank.prepare(run.files, run.version, never) for rank in ranks]
    assert all(report is not None for report in reports)
    return [report for report in reports if report is not None]


def spoil(installation: Installation, name: str) -> None:
    with torch.inference_mode():
        words(installation, name)[3] ^= 4


def words(installation: Installation, name: str) -> torch.Tensor:
    return next(s.words for s in installation.storages.table if s.name == name)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(-(2**15), 2**15 - 1)), min_size=1, max_size=20), st.data())
def test_mark_depends_on_values_and_positions(entries: list[tuple[int, int]], data: st.DataObject) -> None:
    where, values = (torch.tensor([e[i] for e in entries]) for i in (0, 1))
    assert mark(where, values.to(torch.int16)) == mark(where, values)
    order = torch.tensor(data.draw(st.permutations(range(len(entries)))))
    assert mark(where[order], values[order]) == mark(where, values)
    chosen = data.draw(st.integers(0, len(entries) - 1))
    other = values.clone()
    other[chosen] += data.draw(st.integers(1, 2**15))
    assert mark(where, other) != mark(where, values)
    moved = where.clone()
    moved[chosen] += 1 + data.draw(st.integers(0, 2**20))
    assert (mark(moved, values) != mark(where, values)) == bool(values[chosen])


def test_sum_over_ranks_matches_the_patch(run: Any, ranks: list[Installation]) -> None:
    step(run)
    assert wrong(run, prepare(run, ranks)) == []
    step(run)
    step(run)
    assert wrong(run, prepare(run, ranks)) == []  # a chain: only its first patch meets the live weights


@pytest.mark.parametrize("name", ["down", "norm"])
def test_rank_with_other_weights_is_found_by_the_sum(run: Any, ranks: list[Installation], name: str) -> None:
    spoil(ranks[1], name)
    step(run, share=1)
    if name == "norm":  # wholly on the rank, which detects it by itself
        with pytest.raises(IntegrityError, match="live values"):
            prepare(run, ranks)
        assert (ranks[1].held, ranks[1].doubtful) == (None, True)
        return
    assert wrong(run, prepare(run, ranks)) == ["down"]


def test_commit_without_writes_is_detected_and_undone(
    run: Any, ranks: list[Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    step(run)
    prepared = prepare(run, ranks)
    assert ranks[0].commit(run.version) == prepared[0]["mark"]
    old = words(ranks[1], "down").clone()
    monkeypatch.setattr(staged_version, "_write", lambda words, where, values: mark(where, words[where].cpu()))
    with pytest.raises(IntegrityError, match="were not written"):
        ranks[1].commit(run.version)
    assert ranks[1].held == Version(0, 0)
    assert torch.equal(words(ranks[1], "down"), old)


def test_failed_rollback_leaves_no_version(
    run: Any, ranks: list[Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    step(run)
    prepare(run, ranks)
    ranks[0].commit(run.version)
    monkeypatch.setattr(staged_version, "_write", lambda words, where, values: mark(where, words[where].cpu()))
    assert not ranks[0].abort()
    assert (ranks[0].held, ranks[0].doubtful) == (None, True)


def test_dense_install_is_compared_with_the_shadow(run: Any, ranks: list[Installation]) -> None:
    with run.shadow.path.open("rb") as file:
        shadow = ShadowReader(file.fileno(), run.layout)
        args = (shadow, ranks[1].mapping, ranks[1].storages)
        assert equal_elements(*args) == mapped_elements(ranks[1].mapping) == 8 * 6 + 9
        spoil(ranks[1], "norm")
        assert equal_elements(*args) == 8 * 6


def test_whole_prepare_is_dense_at_any_held_version(run: Any, ranks: list[Installation]) -> None:
    spoil(ranks[0], "down")
    found = ranks[0].prepare(run.files, run.version, never, whole=True)
    assert found is not None
    assert found["install"] == "dense"
    assert ranks[0].commit(run.version) == mapped_elements(ranks[0].mapping)
    with run.shadow.path.open("rb") as file:
        shadow = ShadowReader(file.fileno(), run.layout)
        assert equal_elements(shadow, ranks[0].mapping, ranks[0].storages) == mapped_elements(ranks[0].mapping)


def test_a_prepare_that_wakes_up_late_changes_nothing(run: Any, ranks: list[Installation]) -> None:
    rank, first = ranks[0], run.version
    began, go_on, stopped = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def patches(self, base: Version | None, to: Version) -> Any:
            began.set()
            assert go_on.wait(600)
            return run.files.patches(base, to)

    step(run)
    second = run.version
    outcome: list[Any] = []
    late = threading.Thread(target=lambda: outcome.append(rank.prepare(Slow(), second, stopped.is_set)))
    late.start()
    assert began.wait(600)
    stopped.set()
    assert rank.prepare(run.files, second, never) is not None
    rank.commit(second)
    go_on.set()
    late.join(600)
    assert outcome == [None]
    assert (rank.held, rank.prepared) == (second, None)
    assert rank.abort()  # the commit can still be undone
    assert rank.held == first
