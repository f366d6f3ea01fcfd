"""Workers in the ledger's summary: sums by region are whole, and rows name those that need a look first."""

from __future__ import annotations

from typing import Any

from trainer_node.ledger_server.worker_control.engine_regions import MOST_SESSIONS, EngineRegions
from trainer_node.ledger_server.worker_control.worker_summary import OTHERS, worker_summary
from trainer_node.rollout_summary import MAX_FIELDS, MAX_ROWS, MAX_TEXT, RolloutSummary
from trainer_node.scheduling.served_versions import EngineId

SILENT_S = 60.0


def worker(name: str, region: str | None = "eu", **changes: Any) -> dict[str, Any]:
    row = {"name": name, "region": region, "served": "0.3", "slots": 8, "leases": 2, "tokens_per_s": 10.0}
    row |= {"accepted_tokens": 100, "silent_s": 1.0, "drained_s": 0.0, "blamed": 0, "disagreements": 0}
    return row | changes


def test_regions_sum_the_workers_that_are_heard_of() -> None:
    rows = [worker("a"), worker("b", tokens_per_s=None), worker("c", "us"), worker("d", silent_s=61.0)]
    found = worker_summary([*rows, worker("e", None)], SILENT_S)
    assert found["region_workers"] == {"eu": 2, "us": 1, "": 1}
    assert found["region_leases"] == {"eu": 4, "us": 2, "": 2}
    assert found["region_tokens_per_s"] == {"eu": 10.0, "us": 10.0, "": 10.0}


async def test_a_summary_of_many_workers_is_one_that_the_hub_takes() -> None:
    rows = [worker(f"{n:05}" + "x" * 200, f"region {n % 500}" + "y" * 300) for n in range(10_000)]
    found = worker_summary(rows, SILENT_S)
    for name, total in (("workers", 10_000), ("leases", 20_000), ("tokens_per_s", 100_000.0)):
        table = found[f"region_{name}"]
        assert len(table) == MAX_FIELDS
        assert sum(table.values()) == total
        assert OTHERS in table
    assert len(found["worker_rows"]) == MAX_ROWS
    assert all(len(row["name"]) <= MAX_TEXT for row in found["worker_rows"])
    await RolloutSummary().command(found)


def test_workers_that_need_a_look_come_first() -> None:
    rows = [worker(f"good{n:02}") for n in range(MAX_ROWS)]
    rows += [worker("silent", silent_s=99.0), worker("drained", drained_s=9.0)]
    rows += [worker("blamed", blamed=1), worker("lies", disagreements=2)]
    names = [row["name"] for row in worker_summary(rows, SILENT_S)["worker_rows"]]
    assert names[:5] == ["lies", "blamed", "silent", "drained", "good00"]


def test_the_region_is_that_of_the_newest_lease() -> None:
    regions = EngineRegions({"aa": "eu", "bb": "us"}.get)
    assert regions.region(b"s") is None
    regions.note(b"s", EngineId("aa", "e"))
    assert regions.region(b"s") == "eu"
    regions.note(b"s", EngineId("bb", "e"))
    assert regions.region(b"s") == "us"
    regions.note(b"s", EngineId("cc", "e"))
    assert regions.region(b"s") is None


def test_memory_of_sessions_is_bounded() -> None:
    regions = EngineRegions(lambda node: node)
    for number in range(MOST_SESSIONS + 1):
        regions.note(b"%d" % number, EngineId("aa", "e"))
    assert regions.region(b"0") is None
    assert regions.region(b"1") == "aa"
