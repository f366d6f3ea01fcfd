"""The bytes of records, for good: tests/golden/rollouts.hex holds the maps of a group, a job and a result, and the
result's frame. A change of any byte is another format.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.record_form import RolloutRecord
from p2pcast.rollouts.result import Result, Span
from p2pcast.rollouts.routed_experts import RoutedExperts
from p2pcast.rollouts.top_logprobs import TopLogprobs

FILE = Path(__file__).parents[2] / "golden" / "rollouts.hex"
GROUP = Group(
    id=bytes(range(16)), size=4, purpose="evaluate", task="sums", task_hash=bytes(range(32)), prompt=b"12+30=",
    seed=(1 << 64) - 1, temperature=0.5, max_tokens=8, stop_token_ids=(2, 65_537), pinned=Version(1, 12),
)  # fmt: skip
JOB = job_of(GROUP, 3, bytes(range(16, 32)), Version(1, 9))
RESULT = Result(
    job=JOB.job, lease=bytes(range(32, 48)), task_hash=bytes(range(32)),
    token_ids=np.array([5, 6, 70_000, 1, 2, 9, 3, 4], "<u4"), mask=np.array([0, 0, 0, 1, 1, 0, 1, 1], "u1"),
    logprobs=np.array([0, 0, 0, -0.5, -1.5, 0, -0.25, -3], "<f4"),
    spans=(
        Span(Version(1, 11), 3, 5, bytes(32), "keep"),
        Span(Version(1, 12), 6, 8, bytes(range(32)), "drain"),
    ),
    temperature=0.5, reward=0.25, stop="task", turns=np.array([3, 6], "<u4"),
    loss_mask=np.array([0, 0, 0, 1, 0, 0, 1, 1], "u1"), tags=(("forfeit", "no"),),
    schedules=((Version(1, 12), bytes(range(32))),),
    routed_experts=RoutedExperts(2, 2, 1, ((0, 3), (4, 7)), bytes([0, 1, 3, 7, 2, 5, 0, 6] * 3)),
    top_logprobs=TopLogprobs(
        2, ((3, 5),), np.array([1, 70_000, 2, 3], "<u4").tobytes(), np.array([-0.5, -1, -2, -0.25], "<f2").tobytes()
    ),
)  # fmt: skip


def golden() -> dict[str, bytes]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {key: bytes.fromhex(value) for key, value in (line.split(": ", 1) for line in lines)}


@pytest.mark.parametrize("record", [GROUP, JOB, RESULT], ids=["group", "job", "result"])
def test_we_write_and_read_these_maps(record: RolloutRecord) -> None:
    known = golden()[record.kind]
    assert record.to_map().hex(" ") == known.hex(" ")
    assert type(record).from_map(known) == record
    read: Any = type(record).from_map(known)
    missing = [f.name for f in fields(read) if getattr(read, f.name) is None]  # type: ignore[arg-type]
    assert not missing, "every field has a value in the golden map"


def test_earlier_results_are_written_and_read_as_ever() -> None:
    """Earlier results lack later fields."""
    known, earlier = golden()["earlier result"], replace(RESULT, schedules=None, routed_experts=None, top_logprobs=None)
    assert earlier.to_map().hex(" ") == known.hex(" ")
    assert Result.from_map(known) == earlier


def test_we_read_this_frame_and_its_digest() -> None:
    """Not written: another release of zstd may compress differently."""
    known = golden()
    assert Result.from_bytes(known["result frame"]) == RESULT
    assert RESULT.digest() == known["result digest"]


def test_records_are_of_the_kinds_in_the_file() -> None:
    assert set(golden()) == {Group.kind, Job.kind, Result.kind, "earlier result", "result frame", "result digest"}
