"""Whole proofs in pieces: every test and every table belongs to one, and those that passed longest ago come first."""

from __future__ import annotations

from typing import Any

import pytest

from tests import prove
from tests.prove import PARTS, Part, Piece, due, page


def passed(time: str, commit: str, minutes: float = 1.0) -> dict[str, Any]:
    return {"time": time, "commit": commit, "minutes": minutes, "machine": "2 cores"}


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with three pieces, and one with a piece."""
    three: dict[str, Piece] = {name: (name,) for name in "abc"}
    monkeypatch.setattr(prove, "PARTS", {"many": Part("letters", lambda: three), "one": Part("d", prove.one("d"))})


def test_each_file_with_marked_tests_is_a_piece() -> None:
    pieces = PARTS["tests"].pieces()
    assert "test_kill.py" in pieces
    assert "test_prove.py" not in pieces
    assert [files for _, _, _, *files in pieces.values()] == [[f"tests/{name}"] for name in pieces]


def test_each_table_of_mutations_and_each_decoder_is_a_piece() -> None:
    assert "admission" in PARTS["mutations"].pieces()
    assert "context" in PARTS["decoders"].pieces()


@pytest.mark.usefixtures("letters")
def test_pieces_that_never_passed_come_first() -> None:
    record = {"many": {"a": passed("2026-03-02", "a1"), "c": passed("2026-03-01", "c1")}}
    assert [(part, name) for part, name, _ in due(record, ["many", "one"])] == [
        ("many", "b"), ("one", "all"), ("many", "c"), ("many", "a"),
    ]  # fmt: skip


@pytest.mark.usefixtures("letters")
def test_the_page_shows_the_oldest_and_the_newest_piece() -> None:
    record = {"many": {"a": passed("2026-03-02", "a1"), "c": passed("2026-03-01", "c1"), "gone": passed("2025", "g")}}
    row, other = page(record).splitlines()[-2:]
    assert row == "| many | letters | 2 of 3 | 2026-03-01 at c1 and 2026-03-02 at a1 | 2 | 2 cores |"
    assert other == "| one | d | 0 of 1 | never |  |  |"
