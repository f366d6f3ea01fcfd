from __future__ import annotations

import pytest
from fake_holding import FakeHolding

from rollout_node.sync.source_choice import (
    MIRROR_PATIENCE_S,
    SMALL_BYTES,
    SourceChoice,
    choose_source,
    due_from_mirror,
    needs_source,
)

LARGE = SMALL_BYTES + 1
MISSING = {"pulled": False, "offered": False, "sealed_bytes": LARGE, "mirrored": False, "overdue": lambda: True}


def test_an_incomplete_artifact_without_a_sender_needs_a_source():
    assert needs_source(None)
    assert needs_source(FakeHolding(0, 1))
    assert not needs_source(FakeHolding(0, 1, source="parent"))
    assert not needs_source(FakeHolding(0, 1, complete=True))


def never():
    raise AssertionError("the parent's patience decides nothing here")


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"pulled": True, "overdue": never}, SourceChoice.LATER),
        ({"offered": True, "overdue": never}, SourceChoice.PEERS),
        ({"offered": True, "sealed_bytes": SMALL_BYTES, "overdue": never}, SourceChoice.PARENT),
        ({"offered": True, "sealed_bytes": None, "overdue": never}, SourceChoice.PARENT),
        ({}, SourceChoice.PEERS),
        ({"overdue": lambda: False}, SourceChoice.LATER),
        ({"mirrored": True, "overdue": never}, SourceChoice.LATER),
        ({"sealed_bytes": None, "overdue": never}, SourceChoice.LATER),
    ],
)
def test_a_missing_artifact_is_requested_from_its_source(changes, asked):
    for holding in (None, FakeHolding(0, 1), FakeHolding(0, 1, idle=True)):
        assert choose_source(holding, **MISSING | changes) is asked


@pytest.mark.parametrize("holding", [FakeHolding(0, 1, complete=True), FakeHolding(0, 1, source="parent")])
def test_no_source_is_asked_for_held_or_incoming_artifacts(holding):
    assert choose_source(holding, **MISSING | {"overdue": never}) is SourceChoice.NONE


@pytest.mark.parametrize(
    ("holding", "pulled", "has_parent", "listed_for_s", "due"),
    [
        (None, False, False, 0.0, True),
        (FakeHolding(0, 1), False, False, 0.0, True),
        (FakeHolding(0, 1, complete=True), False, False, 99.0, False),
        (FakeHolding(0, 1, source="parent"), False, False, 99.0, False),
        (None, True, False, 99.0, False),
        (None, False, True, MIRROR_PATIENCE_S, False),
        (None, False, True, MIRROR_PATIENCE_S + 1, True),
    ],
)
def test_the_mirror_is_asked_once_the_parent_had_its_time(holding, pulled, has_parent, listed_for_s, due):
    assert due_from_mirror(holding, pulled=pulled, has_parent=has_parent, listed_for_s=listed_for_s) is due
