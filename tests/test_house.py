"""The code's size stays below the values that docs/design/rules.md records."""

from __future__ import annotations

import pytest

from tests.measure_house import values
from tests.rules_of_code import table

RECORDED = {row[0][0]: int(row[1][0]) for row in table("measure")}


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    return values()


def test_each_measure_is_recorded(found: dict[str, int]) -> None:
    assert set(found) == set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_measure_does_not_grow(found: dict[str, int], name: str) -> None:
    assert found[name] <= RECORDED[name], "make it smaller elsewhere, or raise the record with the reason beside it"
