"""Scores of pages and the choice among them, beside plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from rollout_node.vllm_plugin.sparse_attention import page_choice
from rollout_node.vllm_plugin.sparse_attention.page_choice import KeySums, choose_pages

HEADS, GROUP, SIZE, PAGE = 2, 3, 8, 16


def test_scores_are_products_with_the_mean_keys_however_keys_arrive() -> None:
    """In chunks and one by one, in interleaved sequences, in pages that other sequences used before."""
    generator = torch.Generator().manual_seed(1)
    rng = random.Random(1)
    sums = KeySums(40, HEADS, SIZE, PAGE, torch.device("cpu"))
    free = list(range(40))
    for _ in range(5):
        rng.shuffle(free)
        lengths = [rng.randrange(100, 300) for _ in range(2)]
        tables = [free[:19], free[19:38]]
        keys = [torch.randn(length, HEADS, SIZE, generator=generator) for length in lengths]
        at = [0, 0]
        while at != lengths:
            parts, slots = [], []
            for row in range(2):
                end = min(lengths[row], at[row] + rng.choice((1, 1, 7, 60)))
                parts.append(keys[row][at[row] : end])
                slots += [tables[row][i // PAGE] * PAGE + i % PAGE for i in range(at[row], end)]
                at[row] = end
            padding = rng.randrange(3)
            parts.append(torch.randn(padding, HEADS, SIZE, generator=generator))
            sums.add(torch.cat(parts), torch.tensor(slots + [-1] * padding))
        queries = torch.randn(2, HEADS * GROUP, SIZE, generator=generator)
        scores = sums.scores(queries, torch.tensor(tables))
        for row in range(2):
            for page in range(lengths[row] // PAGE):
                inside = keys[row][page * PAGE : page * PAGE + PAGE]
                expected = sum(
                    torch.dot(queries[row, h * GROUP + g], inside[:, h].sum(0)) / GROUP
                    for h in range(HEADS)
                    for g in range(GROUP)
                )
                assert scores[row, page].item() == pytest.approx(float(expected), abs=1e-3)


def test_scores_of_many_long_rows_are_gathered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row pads the others: 256 rows of 128 000 tokens, 8 heads and 128 values would take 8 GiB."""
    generator = torch.Generator().manual_seed(1)
    sums = KeySums(64, HEADS, SIZE, PAGE, torch.device("cpu"))
    sums.add(torch.randn(64 * PAGE, HEADS, SIZE, generator=generator), torch.arange(64 * PAGE))
    queries = torch.randn(11, HEADS * GROUP, SIZE, generator=generator)
    table = torch.randint(0, 64, (11, 40), generator=generator)
    whole = sums.scores(queries, table)
    gathered: list[int] = []

    class Gathering(torch.Tensor):
        def __getitem__(self, index: object) -> torch.Tensor:
            found = super().__getitem__(index)  # type: ignore[index]
            gathered.append(found.nbytes)
            return found.as_subclass(torch.Tensor)

    row = 40 * HEADS * SIZE * 4
    for most in (3 * row, row - 1):
        gathered.clear()
        monkeypatch.setattr(page_choice, "MOST_BYTES", most)
        monkeypatch.setattr(sums, "_sums", sums._sums.as_subclass(Gathering))
        torch.testing.assert_close(sums.scores(queries, table), whole)
        assert max(gathered) == max(row, most), "a row is never split"


def chosen(scores: list[list[float]], pages: list[int], kept: list[int]) -> list[list[int]]:
    found = choose_pages(torch.tensor(scores), torch.tensor(pages), torch.tensor(kept), max(kept))
    return [row[:count] for row, count in zip(found.tolist(), kept, strict=True)]


def test_first_last_two_and_best_pages_are_kept_in_order() -> None:
    assert chosen([[-9.0, 1, 5, 3, 4, -9, -9, 99]], [7], [5]) == [[0, 2, 4, 5, 6]]
    assert chosen([[0.0, 1, 2, 3, 4, 5, 6, 7], [7.0, 6, 5, 4, 3, 2, 1, 0]], [8, 6], [4, 5]) == [
        [0, 5, 6, 7],
        [0, 1, 2, 4, 5],
    ]


def test_scores_that_are_no_numbers_displace_no_reserved_page() -> None:
    nan, inf = float("nan"), float("inf")
    (found,) = chosen([[0.0, nan, inf, -inf, 2, 0, 0]], [7], [4])
    assert found[0] == 0
    assert found[-2:] == [5, 6]
