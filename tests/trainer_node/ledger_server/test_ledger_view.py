"""The ledger's status, readiness, summary and metrics, from a copy of its rows."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from trainer_node.ledger_server.ledger_view import AWAITED_S, IDLE_LOOKS, SILENT_S, SUMMARY_TEXT, LedgerView
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk

STATUS = {
    "versions": 2, "finished": False, "ahead": 4, "epoch": 1, "learner": "l", "groups": {"open": 3},
    "jobs": {"leased": 5}, "leases": {"held": 5}, "batches": {"cut": 1}, "rejections": {"stale": 2},
    "replays": {"same": 1}, "ages": {"accepted": {"0": 7, "1": 2}},
}  # fmt: skip


def worker(name: str, **changes: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "tokens_per_s": 10.04,
        "silent_s": 0.0,
        "accepted_tokens": 100,
        "disagreements": 1,
        "audits": 3,
        "region": "eu",
        "served": "0.1",
        "slots": 8,
        "leases": 2,
        "drained_s": 0.0,
        "blamed": 0,
    }
    return row | changes


class Ledger:
    """A view of rows that a test changes."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = dict(STATUS)
        self.workers = [worker("a"), worker("a", tokens_per_s=None), worker("b", silent_s=SILENT_S + 1)]
        self.delayed, self.looks = "", 0
        self.awaited = ("", 0.0)
        self.facts: dict[str, Any] = {"task": "sums", "times": {"step_s": 2.0, "wait_s": None}}
        self.view = LedgerView(
            self._look,
            lambda: 9,
            lambda: self.facts,
            Tasks(Events()),
            lambda: self.delayed,
            ProbeDesk(),
            lambda: self.awaited,
        )

    async def _look(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        self.looks += 1
        return self.status, self.workers

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Samples by metric and labels."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in self.view.families():
            for sample in family.samples:
                found.setdefault(family.name, {})[tuple(sample.labels.values())] = sample.value
        return found


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


async def test_readers_share_one_look_at_the_rows(ledger: Ledger) -> None:
    await ledger.view.renew()
    ledger.status = STATUS | {"epoch": 2}
    assert ledger.view.status()["epoch"] == 1
    assert ledger.view.workers() == {"workers": ledger.workers}
    ledger.metrics()
    assert ledger.looks == 1
    await ledger.view.renew()
    assert ledger.view.status()["epoch"] == 2


async def test_a_ledger_that_knows_a_version_is_ready(ledger: Ledger) -> None:
    assert ledger.view.ready() == (False, "no version of the weights is known")
    assert not ledger.view.finished()
    await ledger.view.renew()
    assert ledger.view.ready() == (True, "")


async def test_delayed_work_makes_the_ledger_unready_and_is_named(ledger: Ledger) -> None:
    await ledger.view.renew()
    ledger.delayed = "status: the disk is full" + "!" * SUMMARY_TEXT
    assert ledger.view.ready() == (False, ledger.delayed)
    assert ledger.view.status()["delayed"] == ledger.delayed
    assert ledger.view.summary()["delayed"] == ledger.delayed[:SUMMARY_TEXT]


async def test_the_summary_counts_workers_and_leaves_unknown_times_out(ledger: Ledger) -> None:
    await ledger.view.renew()
    summary = ledger.view.summary()
    assert (summary["workers"], summary["silent_workers"]) == (3, 1)
    assert (summary["tokens_per_s"], summary["accepted_tokens"]) == (20.1, 300)
    assert summary["times"] == {"step_s": 2.0}
    assert summary["ages_accepted"] == {"0": 7, "1": 2}
    assert summary["waiting_requests"] == 9
    assert summary["region_workers"] == {"eu": 2}
    assert [row["name"] for row in summary["worker_rows"]] == ["b", "a", "a"]


async def test_metrics_sum_workers_of_one_name(ledger: Ledger) -> None:
    await ledger.view.renew()
    samples = ledger.metrics()
    assert samples["p2pcast_ledger_accepted_tokens"] == {("a",): 200, ("b",): 100}
    assert samples["p2pcast_ledger_audits"] == {("agrees",): 6, ("disagrees",): 3}
    assert samples["p2pcast_ledger_waiting_requests"] == {(): 9}


async def test_metrics_exist_before_the_first_look(ledger: Ledger) -> None:
    assert ledger.metrics()["p2pcast_ledger_epoch"] == {(): 0}


EMPTY: dict[str, Any] = {"jobs": {"accepted": 5}, "groups": {"complete": 2}, "leases": {"settled": 5}}
WAITING = EMPTY | {"groups": {"waiting": 8}}


@pytest.mark.parametrize(
    ("status", "workers", "why"),
    [
        (EMPTY, [worker("a")], "no prompts: no group has been added"),
        (WAITING, [], "no worker asks for leases"),
        (WAITING, [worker("a", silent_s=SILENT_S + 1)], "no worker asks for leases"),
        (WAITING, [worker("a", drained_s=9.0)], "all workers are drained"),
        (WAITING, [worker("a", served=None)], "no worker's engine serves a known version"),
        (WAITING, [worker("a")], "8 groups wait for the learner, at l: 4 are ahead of it"),
        (
            WAITING | {"jobs": {"open": 3}},
            [worker("a")],
            "3 open jobs wait for other workers, or for an engine that serves their version",
        ),
        (WAITING | {"versions": 0}, [worker("a")], "no version of the weights is known"),
        (WAITING | {"finished": True}, [worker("a")], ""),
        (WAITING | {"leases": {"held": 1}}, [worker("a")], ""),
    ],
)
async def test_a_ledger_without_leases_says_why(
    ledger: Ledger, status: dict[str, Any], workers: list[dict[str, Any]], why: str
) -> None:
    ledger.status, ledger.workers = STATUS | status, workers
    for _ in range(IDLE_LOOKS):
        assert ledger.view.idle() == ""
        await ledger.view.renew()
    assert ledger.view.idle() == ledger.view.status()["idle"] == ledger.view.summary()["idle"] == why
    assert ledger.metrics()["p2pcast_ledger_idle"] == {(): float(bool(why))}
    if status.get("versions") != 0:
        assert ledger.view.ready() == (True, f"nothing is leased: {why}" if why else "")


async def test_a_task_whose_prompts_have_ended_is_named(ledger: Ledger) -> None:
    ledger.status, ledger.facts["prompts_ended"] = STATUS | EMPTY, True
    for _ in range(IDLE_LOOKS):
        await ledger.view.renew()
    assert ledger.view.idle() == "no prompts: the task has no further ones"


async def test_a_prompt_that_does_not_come_is_named_before_its_time_limit(ledger: Ledger) -> None:
    """While groups wait, the ledger stays ready."""
    ledger.status, ledger.awaited = STATUS | WAITING, ("prompt 7 of jobs(3) of task x", AWAITED_S + 1)
    await ledger.view.renew()
    awaited = "prompt 7 of jobs(3) of task x has not come for 11 s"
    assert ledger.view.ready() == (True, awaited)
    ledger.status = STATUS | EMPTY
    await ledger.view.renew()
    assert ledger.view.ready() == (False, f"no prompts: {awaited}")
    ledger.awaited = ("prompt 7 of jobs(3) of task x", AWAITED_S - 1)
    assert ledger.view.ready() == (True, "")
