"""Signs of life of an engine's processes: which of them count, and when an engine is frozen."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

from installer_host import ONE, Host

from rollout_node.in_engine.heartbeat import Heartbeat
from rollout_node.installers import engine_installer
from rollout_node.installers.engine_installer import SILENT_S, EnginePulse
from rollout_node.installers.install_instructions import Report
from rollout_node.installers.vllm_server import VllmServer


def sign(incarnation: str, **more: object) -> dict[str, object]:
    return {"rank": 1, "incarnation": incarnation} | more


async def test_a_silent_process_is_named_until_the_ranks_have_answered(host: Host) -> None:
    now = 0.0
    server = VllmServer(host.url, "e")
    server.open()
    host.servers.append(server)
    pulse = EnginePulse(server, lambda: now)
    assert (await pulse.fault(), pulse.beats) == (None, False), "an engine whose plugin sends none"
    pulse.note(sign("a"), 0.0)
    pulse.note(sign("b", process="the engine core"), 1.0)
    now = SILENT_S + 0.5
    found = await pulse.fault()
    assert found is not None
    assert "no sign of life of rank 1 for" in found
    pulse.note(sign("a"), now)
    assert await pulse.fault() is None
    now += SILENT_S
    pulse.note(sign("c"), now)
    assert "the engine core" in str(await pulse.fault())
    pulse.met(now + 0.1)
    assert (await pulse.fault(), pulse.beats) == (None, True), "the processes that are gone do not count"
    now += SILENT_S + 0.1
    assert "rank 1" in str(await pulse.fault()), "stopped right after the ranks had answered"


async def test_a_front_end_that_does_not_answer_is_a_fault(host: Host, monkeypatch) -> None:
    monkeypatch.setattr(engine_installer, "SILENT_S", 600.0)
    installer = await host.installed()
    assert await installer._pulse.fault() is None
    held = asyncio.Event()
    host.engine.answers_health = held
    with monkeypatch.context() as patch:
        patch.setattr(engine_installer, "SILENT_S", 0.05)
        assert "/health" in str(await installer._pulse.fault())
    held.set()
    assert await installer._pulse.fault() is None


async def test_a_process_beats_for_the_engine_that_its_peer_has_named(host: Host) -> None:
    installer, other = await host.installed(), host.installer()
    heard, note = asyncio.Event(), host.socket.signs[host.engine.engine]

    def noted(report: Report, made_at: float) -> None:
        note(report, made_at)
        heard.set()

    host.socket.signs[host.engine.engine] = noted
    await host.socket.start()
    beat = Heartbeat(host.socket.path, "the engine core")
    beat.begin(engine=host.engine.engine, rank=0)
    try:
        async with asyncio.timeout(60):
            await heard.wait()
        assert (installer.committed, other._pulse.beats) == (ONE, False)
    finally:
        beat.end()
        await host.socket.close()


def test_a_first_sign_of_life_precedes_the_answer(tmp_path):
    """Else a process that stopped right after its answer would never be missed."""
    heartbeat, signs = Heartbeat(tmp_path / "sock", "the engine core"), []
    heartbeat._client = SimpleNamespace(report=signs.append)
    heartbeat._thread = threading.current_thread()  # instead of its own
    heartbeat.begin(engine="e", rank=0)
    assert [(sign["process"], sign["engine"]) for sign in signs] == [("the engine core", "e")]


def test_processes_of_an_engine_are_bounded() -> None:
    pulse = EnginePulse(VllmServer("http://h"), lambda: 0.0)
    for number in range(engine_installer.MOST_PROCESSES + 9):
        pulse.note(sign(f"{number}"), 0.0)
    pulse.note(sign("0"), 1.0)
    assert len(pulse._seen) == engine_installer.MOST_PROCESSES
    assert pulse._seen["0"][1] == 1.0
