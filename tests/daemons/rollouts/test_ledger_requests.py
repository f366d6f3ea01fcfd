"""The ledger's HTTP server refuses bad requests with one clear line each, and loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import zstandard
from ledger_stage import END_S, Up, config_of
from parity_task import Parity
from poisoned_task import HALF

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.result import MAX_RESULT_BYTES, Result, Span
from p2pcast.tasks.play import Play, result_of
from p2pcast.tasks.task import Sample
from p2pcast.tasks.task_loader import load_task
from tests.support.fake_engine import digest_of
from tests.support.until import until
from trainer_node.ledger.ledger_rows import MAX_FAILURES
from trainer_node.ledger_server.body_budget import BODY_BYTES
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon
from trainer_node.scheduling.served_versions import KnownEngine

ZERO = Version(0, 0)
MANIFEST = bytes.fromhex(digest_of("0.0"))


class Stage:
    """One daemon, one worker's session, and the tokens of both roles."""

    def __init__(self, daemon: LedgerDaemon, folder: Path, http: aiohttp.ClientSession) -> None:
        self.daemon, self._http = daemon, http
        self._url = f"http://127.0.0.1:{daemon.http.address[1]}"
        self.bearers = {
            "worker": (folder / WORKER_FILE).read_text().strip(),
            "trainer": (folder / "http.token").read_text().strip(),
        }
        self.session = ""

    async def ask(
        self, path: str, body: Any, role: str | None = "worker", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the answer. Bytes are sent as they are, other bodies as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if role is None else {"Authorization": f"Bearer {self.bearers[role]}"}
        async with self._http.post(self._url + path, data=data, headers=sent | (headers or {})) as answer:
            content = await answer.read()
            packed = answer.content_type == "application/x-msgpack"
            return answer.status, msgpack.unpackb(content) if packed else json.loads(content)

    async def get(self, path: str, role: str | None = None) -> tuple[int, Any]:
        sent = {} if role is None else {"Authorization": f"Bearer {self.bearers[role]}"}
        async with self._http.get(self._url + path, headers=sent) as answer:
            return answer.status, await answer.json()

    async def read(self, path: str) -> tuple[int, str]:
        """Status and text of a path that needs no token."""
        async with self._http.get(self._url + path) as answer:
            return answer.status, await answer.text()

    async def until_waiting(self, count: int) -> None:
        """Wait until ``count`` requests wait for leases."""
        await until(lambda: self.get("/status"), holds=lambda found: found[1]["waiting_requests"] >= count)

    async def register(self, name: str, task_hash: bytes = Parity().hash) -> str:
        about = {"name": name, "slots": 4, "task": "parity", "task_hash": task_hash.hex()}
        status, answer = await self.ask("/v1/workers", about)
        assert status == 200, answer
        return str(answer["session"])

    async def lease(self, session: str, slots: int = 1, **more: Any) -> list[Any]:
        body = {"session": session, "slots": slots, "served": "0.0", "manifest": MANIFEST.hex(), "wait_s": 10.0}
        status, answer = await self.ask("/v1/lease", body | more)
        assert status == 200, answer
        return [(row["lease"], Job.from_bytes(row["job"])) for row in answer["leases"]]

    async def hand_in(self, session: str, *results: Result) -> tuple[int, Any]:
        packed = {"session": bytes.fromhex(session), "results": [result.to_bytes() for result in results]}
        return await self.ask("/v1/results", msgpack.packb(packed))


class OneSampler:
    """``first``: the first of two tokens."""

    def __init__(self, first: int, version: Version) -> None:
        self._first, self._version = first, version

    async def sample(self, prompt_ids: Any, **more: Any) -> Sample:
        return Sample([self._first, 2], [-1.0, -1.0], [Span(self._version, 0, 2, MANIFEST, "recompute")], "end")


async def played(lease: bytes, job: Job, *, odd: bool = True, version: Version = ZERO) -> Result:
    """``odd``: the reward is 1."""
    play = Play(job.prompt)
    sample = await play.turn(OneSampler(3 if odd else 4, version), job, job.max_tokens, (2,))
    return result_of(job, lease, play.end(sample.stop), 0.0)


def changed(result: Result, **fields: Any) -> Result:
    return Result(**{name: getattr(result, name) for name in Result._reads} | fields)


@pytest.fixture
async def stage(tmp_path: Path, up: Up) -> AsyncIterator[Stage]:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon, aiohttp.ClientSession() as http:
        made = Stage(daemon, tmp_path, http)
        status, answer = await made.ask("/v1/learner/resume", {"branch": 0, "step": 0, "batches": []}, "trainer")
        assert (status, answer) == (200, {"epoch": 1})
        assert (await made.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer"))[0] == 200
        made.session = await made.register("w")
        yield made


@pytest.mark.parametrize(
    ("path", "role", "status"),
    [
        ("/v1/lease", None, 401),
        ("/v1/batches/take", None, 401),
        ("/v1/batches/take", "worker", 403),
        ("/v1/batches/ack", "worker", 403),
        ("/v1/learner/resume", "worker", 403),
        ("/v1/groups", "worker", 403),
        ("/v1/groups/read", "worker", 403),
        ("/v1/versions", "worker", 403),
        ("/v1/workers/drain", None, 401),
        ("/v1/workers/drain", "worker", 403),
        ("/v1/workers/stay", None, 401),
        ("/v1/workers/stay", "worker", 403),
        ("/v1/lease", "trainer", 403),
        ("/v1/results", "trainer", 403),
    ],
)
async def test_a_role_sends_its_own_requests_alone(stage: Stage, path: str, role: str | None, status: int) -> None:
    found, answer = await stage.ask(path, {}, role)
    assert found == status, answer
    assert answer["error"]
    assert "Traceback" not in answer["error"]


async def test_a_worker_reads_neither_groups_nor_other_workers(stage: Stage) -> None:
    for path in ("/v1/workers", "/v1/status", f"/v1/groups/{'0' * 32}"):
        assert (await stage.get(path, "worker"))[0] == 403
        assert (await stage.get(path, None))[0] in (401, 403)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "the request's body: expected object, got array"),
        (b'{"x": %s' % (b"[" * 100_000), "nested too deeply"),
        ({"session": "00", "slots": 1}, "field session: not 32 hexadecimal digits"),
        ({"session": "0" * 32, "slots": True}, "field slots: expected int, got bool"),
        ({"session": "0" * 32, "slots": 1, "served": "x", "manifest": "0" * 64}, "version"),
        ({"session": "0" * 32, "slots": 1, "served": "0.0", "manifest": "ab"}, "field manifest"),
        (
            b'{"session": "%s", "slots": 1, "served": "0.0", "manifest": "%s", "wait_s": NaN}' % (b"0" * 32, b"0" * 64),
            "not JSON",
        ),
    ],
)
async def test_a_malformed_request_is_refused_with_its_field(stage: Stage, body: Any, said: str) -> None:
    status, answer = await stage.ask("/v1/lease", body)
    assert status == 400
    assert said in answer["error"]


async def test_an_unknown_session_is_told_to_register(stage: Stage) -> None:
    body = {"session": "0" * 32, "slots": 1, "served": "0.0", "manifest": MANIFEST.hex()}
    for path, more in (("/v1/lease", body), ("/v1/heartbeat", {"session": "0" * 32, "leases": []})):
        status, answer = await stage.ask(path, more)
        assert status == 404
        assert "register" in answer["error"]


@pytest.mark.parametrize("path", ["/v1/lease", "/v1/results", "/v1/groups"])
async def test_a_body_above_its_limit_is_refused_unread(stage: Stage, path: str) -> None:
    role = "trainer" if path == "/v1/groups" else "worker"
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.daemon.http.address[1])
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {stage.bearers[role]}\r\n"
    writer.write(f"{head}Content-Length: {BODY_BYTES + 1}\r\n\r\n".encode())
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_results_without_a_length_are_refused(stage: Stage) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"\x80"

    url = f"http://127.0.0.1:{stage.daemon.http.address[1]}/v1/results"
    sent = {"Authorization": f"Bearer {stage.bearers['worker']}"}
    async with aiohttp.ClientSession() as http, http.post(url, data=parts(), headers=sent) as answer:
        assert answer.status == 400
        assert "Content-Length" in (await answer.json())["error"]


async def test_a_drained_worker_waits_until_admitted(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    order = {"name": "w", "for_s": 600.0}
    assert await stage.ask("/v1/workers/drain", order, "trainer") == (200, {"leases": 1})
    assert await stage.lease(stage.session, wait_s=0.0) == []
    await stage.daemon.view.renew()
    [worker] = (await stage.get("/v1/workers", "trainer"))[1]["workers"]
    assert 0 < worker["drained_s"] <= 600
    status, answer = await stage.hand_in(stage.session, await played(lease, job))
    assert (status, answer["results"][0]["verdict"]) == (200, "accepted")
    assert await stage.ask("/v1/workers/drain", order, "trainer") == (200, {"leases": 0})
    waiting = asyncio.create_task(stage.lease(stage.session, wait_s=30.0))
    await stage.until_waiting(1)
    assert await stage.ask("/v1/workers/drain", {"name": "w", "for_s": 0}, "trainer") == (200, {"leases": 0})
    assert len(await waiting) == 1
    assert await events_of(stage, "worker_drained", "worker_admitted") == [
        ("worker_drained", {"name": "w", "leases": 1, "for_s": 600.0}),
        ("worker_admitted", {"name": "w"}),
    ]


async def test_no_broadcast_waits_for_the_engine_of_a_drained_worker(stage: Stage) -> None:
    async def on_the_way() -> set[Version]:
        await stage.daemon.view.renew()
        return set(stage.daemon._times._on_the_way)

    await stage.lease(await stage.register("leaving"))
    manifest = digest_of("0.1")
    await stage.ask("/v1/versions", {"version": "0.1", "manifest": manifest}, "trainer")
    await stage.lease(stage.session, served="0.1", manifest=manifest)
    assert await on_the_way() == {Version(0, 1)}, "one of two engines serves the version"
    await stage.ask("/v1/workers/drain", {"name": "leaving", "for_s": 600.0}, "trainer")
    assert await on_the_way() == set()


@pytest.mark.parametrize(
    ("overlong", "said"),
    [
        ("drop", "no treatment of overlong rollouts is named 'drop': use keep, mask or zero"),
        (0, "field overlong: expected str | null, got int"),
        ("z" * 33, "field overlong: expected str of length <= 32"),
    ],
)
async def test_an_unknown_treatment_of_cut_answers_is_refused(stage: Stage, overlong: Any, said: str) -> None:
    asks = {"epoch": 1, "branch": 0, "step": 0}
    assert await stage.ask("/v1/batches/take", asks | {"overlong": overlong}, "trainer") == (400, {"error": said})
    for known in ({}, {"overlong": "keep"}, {"overlong": "mask"}, {"overlong": "zero"}, {"of_a_newer_learner": 1}):
        status, answer = await stage.ask("/v1/batches/take", asks | known, "trainer")
        assert (status, "wait" in answer) == (200, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "field name: expected str of length >= 1"),
        ({"name": "w\n"}, "name has characters that are not printable"),
        ({"for_s": None}, "field for_s: expected float, got null"),
        ({"for_s": -1}, "field for_s: expected float >= 0.0"),
        ({"for_s": 86401}, "field for_s: expected float <= 86400.0"),
    ],
)
async def test_a_malformed_order_to_drain_is_refused(stage: Stage, change: dict[str, Any], said: str) -> None:
    status, answer = await stage.ask("/v1/workers/drain", {"name": "w", "for_s": 1.0} | change, "trainer")
    assert status == 400
    assert said in answer["error"]


async def test_a_waiting_request_ends_when_its_engine_goes_on_to_another_version(stage: Stage) -> None:
    """The worker states the new version at once: the ledger may have jobs for that version alone."""
    engines = {"moving": ZERO, "staying": ZERO}
    hub = SimpleNamespace(
        engine=lambda one: KnownEngine(engines[one.name], None), reached=True, caught_up=True, region=lambda node: "eu"
    )
    stage.daemon._hub.follower = hub  # type: ignore[assignment]
    await stage.ask("/v1/workers/drain", {"name": "w", "for_s": 600.0}, "trainer")
    asks = {"session": stage.session, "slots": 1, "served": "0.0", "manifest": MANIFEST.hex(), "wait_s": 30.0}

    def asking(name: str) -> asyncio.Task[tuple[int, Any]]:
        engine = {"node": bytes(16).hex(), "name": name}
        return asyncio.create_task(stage.ask("/v1/lease", asks | {"engine": engine}))

    staying, moving = asking("staying"), asking("moving")
    await stage.until_waiting(2)
    engines["moving"] = Version(0, 1)
    status, answer = await moving
    assert (status, answer["leases"], answer["finished"]) == (200, [], False)
    assert not staying.done()
    engines["staying"] = Version(0, 1)
    await staying


async def test_workers_play_an_evaluation_after_the_last_step(tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, last_step=0)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await stage.ask("/v1/learner/resume", {"branch": 0, "step": 0, "batches": []}, "trainer")
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        await daemon.view.renew()
        assert daemon.view.finished()
        asks = {"session": await stage.register("w"), "slots": 1, "served": "0.0", "manifest": MANIFEST.hex()}
        assert await stage.ask("/v1/workers/stay", {"for_s": 600}, "trainer") == (200, {})
        status, before = await stage.ask("/v1/lease", asks)
        assert (status, before["leases"], before["finished"]) == (200, [], False)
        waiting = asyncio.create_task(stage.ask("/v1/lease", asks | {"wait_s": 30.0}))
        task = Parity()
        group = Group(
            id=bytes(16), size=1, purpose="evaluate", task=task.name, task_hash=task.hash, prompt=b"\x03", seed=0,
            temperature=0.0, max_tokens=4, pinned=ZERO,
        )  # fmt: skip
        packed = msgpack.packb({"groups": [group.to_bytes()]})
        assert await stage.ask("/v1/groups", packed, "trainer") == (200, {"added": 1})
        [lease] = (await waiting)[1]["leases"]
        assert Job.from_bytes(lease["job"]).purpose == "evaluate"
        assert await stage.ask("/v1/workers/stay", {"for_s": 0}, "trainer") == (200, {})
        assert (await stage.ask("/v1/lease", asks))[1]["finished"]


async def test_prompts_of_which_no_group_can_be_made_refuse_no_lease(tmp_path: Path, up: Up) -> None:
    config, task = config_of(tmp_path), load_task(HALF)
    policy = dataclasses.replace(config.policy, task_hash=task.hash)
    config = dataclasses.replace(config, task=task, task_name=HALF, policy=policy)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await stage.ask("/v1/learner/resume", {"branch": 0, "step": 0, "batches": []}, "trainer")
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        session = await stage.register("w", task.hash)
        assert len(await stage.lease(session, 4)) == 4
        ((_, event),) = await events_of(stage, "prompt_rejected")
        assert event == {"prompt": "prompt 1 (row 1)", "why": "its max_tokens is 0, not an int from 1 to 1048576"}
        _, status = await stage.get("/status", "trainer")
        assert status["rejected_prompts"] >= 1
        assert status["newest_rejected_prompts"][-1]["name"].endswith(f"(row {2 * status['rejected_prompts'] - 1})")
        assert "p2pcast_ledger_rejected_prompts_total" in (await stage.read("/metrics"))[1]


async def test_a_job_that_comes_back_at_fault_is_rejected_and_named(stage: Stage) -> None:
    for number in range(MAX_FAILURES):
        [(lease, _)] = await stage.lease(stage.session)
        why = {"lease": lease.hex(), "reason": "failed play", "detail": "KeyError: 'card'"}
        unknown = {"lease": lease.hex(), "reason": "of a newer worker"}
        # An older worker gives no reason.
        reasons = {} if number == 0 else {"reasons": [why] if number > 1 else [unknown]}
        assert await stage.ask("/v1/return", {"session": stage.session, "leases": [lease.hex()]} | reasons) == (200, {})
    await stage.daemon.view.renew()
    assert stage.daemon.view.status()["rejected_jobs"] == {}
    for _ in range(MAX_FAILURES - 1):
        [(lease, _)] = await stage.lease(stage.session)
        body = {"session": stage.session, "leases": [lease.hex()], "reasons": [why | {"lease": lease.hex()}]}
        assert await stage.ask("/v1/return", body) == (200, {})
    told = [{"prompt": "prompt 0 of seed 7", "reason": "failed play", "why": "KeyError: 'card'"}]
    assert await events_of(stage, "job_rejected") == [("job_rejected", told[0] | {"jobs": 1})]
    await stage.daemon.view.renew()
    _, status = await stage.get("/status", "trainer")
    assert status["rejected_jobs"] == {"failed play": 1}
    assert status["newest_rejected_jobs"] == told
    assert status["returned_leases"] == {"not stated": 2, "failed play": 3}
    assert 'p2pcast_ledger_rejected_jobs{reason="failed play"} 1.0' in (await stage.read("/metrics"))[1]


@pytest.mark.parametrize(
    "reason",
    [
        {},
        {"lease": "ab", "reason": "engine"},
        {"lease": "ab" * 16, "reason": "x" * 33},
        {"lease": "ab" * 16, "reason": 3},
        {"lease": "ab" * 16, "reason": "engine", "detail": "x" * 301},
        {"lease": "ab" * 16, "reason": "engine", "detail": "two\nlines"},
    ],
)
async def test_a_malformed_reason_is_refused(stage: Stage, reason: dict[str, Any]) -> None:
    body = {"session": stage.session, "leases": [], "reasons": [reason]}
    status, answer = await stage.ask("/v1/return", body)
    assert (status, answer["error"][:16]) == (400, "field reasons[0]")


async def test_the_place_of_a_wrong_group_is_named(stage: Stage) -> None:
    task = Parity()
    good = Group(
        id=bytes(16), size=2, purpose="train", task=task.name, task_hash=task.hash, prompt=b"\x03", seed=0,
        temperature=1.0, max_tokens=4,
    )  # fmt: skip
    wrong = dataclasses.replace(good, max_tokens=0)
    packed = msgpack.packb({"groups": [good.to_bytes(), wrong.to_bytes()]})
    status, answer = await stage.ask("/v1/groups", packed, "trainer")
    assert (status, answer["error"]) == (400, "groups[1]: group: 'max_tokens' is malformed or out of range")


FIELDS = ("name", "leases", "for_s", "prompt", "reason", "why", "worker", "jobs")


async def events_of(stage: Stage, *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """Kind and fields of the first events of these kinds, one for each."""
    url = f"http://127.0.0.1:{stage.daemon.http.address[1]}/events?since=0"
    found: list[tuple[str, dict[str, Any]]] = []
    kind = ""
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        while len(found) < len(kinds):
            line = (await answer.content.readline()).decode()
            if line.startswith("event: "):
                kind = line.removeprefix("event: ").strip()
            elif line.startswith("data: ") and kind in kinds:
                fields = json.loads(line.removeprefix("data: "))
                found.append((kind, {name: fields[name] for name in FIELDS if name in fields}))
    return found


async def test_the_same_result_again_gets_the_same_verdict_and_another_409(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    result = await played(lease, job)
    first = await stage.hand_in(stage.session, result)
    assert (first[0], first[1]["results"][0]["verdict"]) == (200, "accepted")
    assert await stage.hand_in(stage.session, result) == first
    status, answer = await stage.hand_in(stage.session, changed(result, reward=0.5))
    assert status == 409
    assert "another result" in answer["error"]


async def test_a_request_that_is_sent_again_starts_no_second_check(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    result, begins, ends = await played(lease, job), asyncio.Event(), asyncio.Event()
    begun = 0

    async def check(handed_in: Sequence[object]) -> list[float]:
        nonlocal begun
        begun += len(handed_in)
        begins.set()
        await ends.wait()
        return [1.0] * len(handed_in)

    monkeypatch.setattr(stage.daemon._scorers, "check", check)
    first = asyncio.create_task(stage.hand_in(stage.session, result))
    await begins.wait()
    first.cancel()  # the worker gives up; the ledger goes on
    again = asyncio.create_task(stage.hand_in(stage.session, result))
    await stage.get("/status")
    ends.set()
    status, answer = await again
    assert (status, answer["results"][0]["verdict"], begun) == (200, "accepted", 1)


async def test_a_heartbeats_answer_has_the_present_interval(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    beat, ledger = {"session": stage.session, "leases": []}, stage.daemon._ledger
    assert (await stage.ask("/v1/heartbeat", beat))[1] == {"leases": [], "heartbeat_s": 1.5}
    with monkeypatch.context() as patched:
        for workers, interval_s in ((1000, 10.0), (100_000, 25.0)):
            patched.setattr(ledger, "pace_heartbeats", lambda present: None)  # as the daemon counts once a second
            ledger._rates.count_workers(workers)
            assert (await stage.ask("/v1/heartbeat", beat))[1]["heartbeat_s"] == interval_s
    await stage.daemon.view.renew()
    assert (await stage.ask("/v1/heartbeat", beat))[1]["heartbeat_s"] == 1.5, "one worker is there"


async def test_a_worker_settles_no_lease_of_another(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    thief = await stage.register("thief")
    status, answer = await stage.hand_in(thief, await played(lease, job))
    assert (status, answer["results"][0]["reason"]) == (200, "unknown lease")
    assert (await stage.ask("/v1/return", {"session": thief, "leases": [lease.hex()]}))[0] == 200
    status, answer = await stage.hand_in(stage.session, await played(lease, job))
    assert answer["results"][0]["verdict"] == "accepted"


async def test_tokens_that_the_task_did_not_say_are_forged(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    result = await played(lease, job)
    token_ids = result.token_ids.copy()
    token_ids[0] += 1
    _, answer = await stage.hand_in(stage.session, changed(result, token_ids=token_ids))
    assert answer["results"][0]["reason"] == "forged"
    await stage.daemon.view.renew()
    [worker] = (await stage.get("/v1/workers", "trainer"))[1]["workers"]
    assert (worker["name"], worker["blamed"], worker["accepted_tokens"]) == ("w", 1, 0)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stop", "length", "stopped with 'end', not 'length'"),
        ("turns", np.array([3], "<u4"), "begin elsewhere"),
        ("loss_mask", np.array([0, 0, 1, 1], "u1"), "task parity states none"),
    ],
)
async def test_other_fields_of_a_result_follow_the_tasks_play(stage: Stage, field: str, value: Any, said: str) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    _, answer = await stage.hand_in(stage.session, changed(await played(lease, job), **{field: value}))
    assert answer["results"][0]["reason"] == "forged"
    assert said in answer["results"][0]["detail"]


@pytest.mark.parametrize(
    ("fields", "reason", "said"),
    [
        (
            {"logprobs": np.array([0, 0, np.nan, -1], "<f4")},
            "malformed",
            "a log-probability that is above 0 or not finite",
        ),
        ({"spans": [Span(ZERO, 2, 4, b"x" * 32, "recompute")]}, "forged", "version 0.0 has another manifest"),
    ],
)
async def test_a_result_that_no_engine_can_have_made_gets_one_clear_line(
    stage: Stage, fields: dict[str, Any], reason: str, said: str
) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    status, answer = await stage.hand_in(stage.session, changed(await played(lease, job), **fields))
    assert (status, answer["results"][0]["reason"], answer["results"][0]["detail"]) == (200, reason, said)


async def test_results_that_are_no_records_change_nothing(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    good = (await played(lease, job)).to_bytes()
    for bad in (b"", good[:-1], b"\x00" + good, os.urandom(200), 5, [good]):
        packed = msgpack.packb({"session": bytes.fromhex(stage.session), "results": [good, bad]})
        status, answer = await stage.ask("/v1/results", packed)
        assert status == 400, answer
    assert (await stage.hand_in(stage.session, await played(lease, job)))[1]["results"][0]["verdict"] == "accepted"


async def test_small_results_that_unpack_to_more_than_a_request_are_refused_unread(stage: Stage) -> None:
    [(lease, job)] = await stage.lease(stage.session)
    bomb = zstandard.compress(bytes(MAX_RESULT_BYTES))
    packed = msgpack.packb({"session": bytes.fromhex(stage.session), "results": [bomb] * 5})
    assert len(packed) < 10_000
    status, answer = await stage.ask("/v1/results", packed)
    assert status == 413, answer
    assert "fewer records" in answer["error"]
    assert (await stage.hand_in(stage.session, await played(lease, job)))[1]["results"][0]["verdict"] == "accepted"


async def test_waiting_requests_get_leases_when_groups_come(tmp_path: Path, up: Up) -> None:
    async with (
        asyncio.timeout(END_S),
        up(config_of(tmp_path, feed=None, batch_groups=64)) as daemon,
        aiohttp.ClientSession() as http,
    ):
        made = Stage(daemon, tmp_path, http)
        await made.ask("/v1/learner/resume", {"branch": 0, "step": 0, "batches": []}, "trainer")
        sessions = [await made.register(f"w{number}") for number in range(40)]
        waiting = [asyncio.create_task(made.lease(session, 1, wait_s=30.0)) for session in sessions]
        await made.until_waiting(len(sessions))
        # The engines' version is not known yet, so the groups alone make no leases.
        prompt = next(iter(Parity().jobs(0)))
        groups = [
            Group(
                id=number.to_bytes(16, "big"), size=2, purpose="train", task="parity", task_hash=Parity().hash,
                prompt=prompt.prompt, seed=number, temperature=1.0, max_tokens=8,
            )
            for number in range(20)
        ]  # fmt: skip
        packed = msgpack.packb({"groups": [group.to_bytes() for group in groups]})
        assert await made.ask("/v1/groups", packed, "trainer") == (200, {"added": 20})
        await made.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        found = await asyncio.gather(*waiting)
        assert sorted(len(leases) for leases in found) == [1] * 40
        assert len({leases[0][1].job for leases in found}) == 40
