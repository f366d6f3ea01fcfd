"""How many rollouts of a batch the guard of sparse attention judges, and whose: no worker crowds others out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.rollouts.top_logprobs import TopTokens
from tests.trainer_node.learning.example_rows import HASH, VOCABULARY, batch, result
from trainer_node.learning.objective.judged_tokens import MOST_JUDGED, JudgedTokens, in_turns
from trainer_node.learning.objective.training_rows import rows_of

LIAR = "liar"
HONEST = [f"honest-{number}" for number in range(5)]


def judged(number: int) -> JudgedTokens:
    """Of a schedule of its own."""
    return JudgedTokens(
        number.to_bytes(32, "big"), np.array([4]), np.zeros((1, 1), np.int64), np.full((1, 1), -1.0, np.float32)
    )


def kept(workers: Sequence[str], counts: Sequence[int], seed: bytes = b"s") -> Counter[str]:
    """Of rollouts with so many judged parts each: those that are chosen, by worker."""
    numbers = iter(range(sum(counts)))
    found = [[judged(next(numbers)) for _ in range(count)] for count in counts]
    chosen = in_turns(found, workers, seed)
    for before, after in zip(found, chosen, strict=True):
        assert all(any(one is other for other in before) for one in after), "of another rollout"
    return Counter(worker for worker, own in zip(workers, chosen, strict=True) for _ in own)


def test_one_worker_takes_no_turn_of_another() -> None:
    workers = [LIAR] * 500 + HONEST
    for seed in range(20):
        found = kept(workers, [1] * len(workers), bytes([seed]))
        assert found == {LIAR: MOST_JUDGED - len(HONEST), **dict.fromkeys(HONEST, 1)}


def test_many_schedules_of_one_rollout_are_so_many_turns() -> None:
    """Each costs a forward pass of the rollout."""
    found = kept([LIAR, *HONEST], [500, *(1 for _ in HONEST)])
    assert found == {LIAR: MOST_JUDGED - len(HONEST), **dict.fromkeys(HONEST, 1)}


def test_workers_that_send_alike_are_judged_alike() -> None:
    found = kept(HONEST * 100, [1] * (100 * len(HONEST)))
    assert set(found.values()) <= {MOST_JUDGED // len(HONEST), MOST_JUDGED // len(HONEST) + 1}
    assert found.total() == MOST_JUDGED


def test_worker_with_many_rollouts_is_no_likelier_to_have_a_turn() -> None:
    """There are more workers than turns."""
    others = [f"w{number}" for number in range(2 * MOST_JUDGED - 1)]
    workers = [*others, *[LIAR] * 1000]
    had = sum(LIAR in kept(workers, [1] * len(workers), seed.to_bytes(2, "big")) for seed in range(200))
    # 100 of 200 draws, with a standard deviation of 7.
    assert 65 < had < 135


def test_few_are_all_judged() -> None:
    workers = [LIAR] * (MOST_JUDGED - 1) + HONEST[:1]
    assert kept(workers, [1] * MOST_JUDGED).total() == MOST_JUDGED


def test_judged_rollouts_of_a_batch_are_bounded() -> None:
    """The same batch again has the same ones, and another batch has others."""
    collected = TopTokens()
    collected.add(3, np.tile(np.arange(5, dtype=np.uint32), (2, 1)), np.full((2, 5), -2.0, np.float32))
    spans = (Span(Version(0, 4), 3, 5, HASH, "recompute"), Span(Version(0, 4), 6, 8, HASH, "recompute"))
    made = result(spans=spans, schedules=[(Version(0, 4), HASH)], top_logprobs=collected.packed())
    of = batch(*([(made, 1.0), (made, 0.0)] for _ in range(MOST_JUDGED)))
    options = {"kind": "dr_grpo", "eps": 0.0, "overlong": "keep", "step": 5, "staleness": 3, "vocabulary": VOCABULARY}

    def places(one: object) -> list[int]:
        rows = rows_of(one, **options, judged_staleness=1)
        return [number for number, row in enumerate(rows) if row.judged]

    assert len(places(of)) == MOST_JUDGED
    assert places(of) == places(of)
    assert places(of) != places(replace(of, id=b"other" + bytes(11)))
