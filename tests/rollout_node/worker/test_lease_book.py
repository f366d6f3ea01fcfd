"""Leases of one worker, against a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_node.worker.lease_book import LeaseBook

LEASES = st.integers(0, 9).map(lambda number: bytes([number]) * 16)
STEPS = st.lists(
    st.tuples(st.just("add"), st.lists(LEASES, max_size=4))
    | st.tuples(st.just("sampled"), LEASES)
    | st.tuples(st.just("end"), LEASES)
    | st.tuples(st.just("left"), st.lists(LEASES, max_size=4))
    | st.tuples(st.just("heard"), st.dictionaries(LEASES, st.sampled_from(["held", "abort", "unknown"]), max_size=4)),
    max_size=40,
)


@given(st.integers(1, 4), STEPS)
def test_leases_are_run_reported_and_ended_once(slots: int, steps: list[tuple[str, object]]) -> None:
    book, running, aborted, tokens = LeaseBook(slots), set[bytes](), set[bytes](), dict[bytes, int]()
    waiting = set[bytes]()
    for kind, given_ in steps:
        if kind == "add":
            taken = book.add(given_)  # type: ignore[arg-type]
            assert len(set(taken)) == len(taken)
            assert not running & set(taken)
            running |= set(taken)
            tokens |= dict.fromkeys(taken, 0)
        elif kind == "sampled":
            book.sampled(given_, 3)  # type: ignore[arg-type]
            if given_ in running:
                tokens[given_] += 3  # type: ignore[index]
        elif kind == "end":
            ends = given_ in running - aborted
            assert book.end(given_) == ends  # type: ignore[arg-type]
            if ends:
                book.result_waits(given_)  # type: ignore[arg-type]
                waiting.add(given_)  # type: ignore[arg-type]
            running.discard(given_)  # type: ignore[arg-type]
            aborted.discard(given_)  # type: ignore[arg-type]
        elif kind == "left":
            book.results_left(given_)  # type: ignore[arg-type]
            waiting -= set(given_)  # type: ignore[call-overload]
        else:
            ending = book.apply_states(given_)  # type: ignore[arg-type]
            wanted = {lease for lease, state in given_.items() if state == "abort"} & running - aborted  # type: ignore[attr-defined]
            assert set(ending) == wanted
            aborted |= wanted
        assert len(running) + len(waiting) <= slots or kind != "add" or not taken
        assert book.free == max(0, slots - len(running) - len(waiting))
        assert book.tokens() == {lease: tokens[lease] for lease in running - aborted}
