"""``p2pcast fleet run`` with a real ledger, and commands that start real workers."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest
from fleet_stage import SLOTS, staged

from tests.support.fake_engine import FakeEngine

TRAIN_S = 1.5
"""A learner's work of one step: six steps of it are longer than a broadcast on a busy machine."""
OFFERS = {"cheap": "0.1:20:1", "dear": "0.9:20:1"}
FAILS = """#!/bin/sh
echo "$P2PCAST_WORKER" >> {folder}/failed
echo no machine of this kind
exit 1
"""


async def test_an_operator_starts_drains_and_finds_its_workers(tmp_path: Path, engine: FakeEngine) -> None:
    engine.versions = ["0.0"]
    engine.gate.clear()
    async with staged(tmp_path, engine) as stage:
        await stage.ledger("--lease-guess", "3600")
        stage.offer("cheap", "dear")
        client = stage.client()
        client.resume(0, 0)
        stage.publish(client, 0)

        await stage.operator("first", 1, OFFERS)
        await stage.until(lambda: stage.lines("started"), "a worker is started")
        assert stage.lines("started") == ["cheap-0"], "the cheapest per rollout"
        await stage.ended("first", signal.SIGKILL)

        await stage.operator("second", 2, OFFERS)
        await stage.until(lambda: len(stage.lines("started")) > 1, "the capacity is below the new target")
        await stage.looks(10)
        assert stage.lines("started") == ["cheap-0", "dear-0"], "the next operator finds its predecessor's worker"
        await stage.until_workers(
            lambda found: [row["leases"] for row in found.values()] == [SLOTS] * 2, "both workers play"
        )
        assert await stage.ended("second", signal.SIGTERM) == 0
        assert stage.lines("stopped") == []

        await stage.operator("third", 1, OFFERS)
        await stage.until_workers(lambda found: found["dear-0"]["drained_s"] > 0, "the dear worker is drained")
        await stage.looks(10)
        found = await stage.workers()
        assert (found["dear-0"]["leases"], found["cheap-0"]["drained_s"]) == (SLOTS, 0)
        assert stage.lines("stopped") == [], "a worker that holds leases is not stopped"
        engine.gate.set()
        await stage.until(lambda: stage.lines("stopped"), "the drained worker is stopped")
        assert stage.lines("stopped") == ["dear-0"]
        assert stage.leases("dear-0") == {("settled", "accepted"): SLOTS}, "a result of the drained worker is lost"

        assert await stage.ended("third", signal.SIGTERM) == 0
        assert stage.lines("started") == ["cheap-0", "dear-0"]

        await asyncio.to_thread(stage.learn, 7, TRAIN_S)
        await stage.operator("look", 1, OFFERS, "--dry-run")
        assert await stage.ended("look") == 0
        needed = re.search(r"^needed: ([0-9.]+) rollouts/s; asked for: ([0-9.]+) rollouts/s", stage.said("look"), re.M)
        assert needed, stage.said("look")
        assert float(needed[2]) == pytest.approx(1.1 * float(needed[1]), rel=0.01)
        assert "runs cheap-0" in stage.said("look")
        assert "dear-0" not in stage.said("look").partition("would")[0]


async def test_a_provider_that_fails_is_left_alone(tmp_path: Path, engine: FakeEngine) -> None:
    engine.versions = ["0.0"]
    async with staged(tmp_path, engine) as stage:
        await stage.ledger()
        stage.offer("cheap", "dear", cheap=FAILS)
        await stage.operator("operator", 1, {"cheap": "0.1:20:3", "dear": "0.9:20:1"})
        await stage.until(lambda: stage.lines("started"), "the next kind is started")
        await stage.looks(20)
        assert stage.lines("failed") == ["cheap-0"]
        assert stage.lines("started") == ["dear-0"]
        assert "no machine of this kind" in stage.said("operator")
