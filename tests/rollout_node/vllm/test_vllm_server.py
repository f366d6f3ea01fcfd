"""A real vLLM API server (CPU build), driven over HTTP as a peer drives it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_server import PROMPTS, Server, choice, complete, fresh, load, make_model, one_off_connections

from p2pcast.ground.errors import IntegrityError, LocalError, RetryableError
from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Audit
from rollout_node.installers.vllm_server import VllmServer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("vllm")
    # Dense until a version brings a schedule. The first two layers always are.
    sparse = {"P2PCAST_SPARSE_ATTENTION": "1"}
    with Server(make_model(folder / "model", layers=3), folder, "--block-size", "32", environment=sparse) as found:
        yield found


@pytest.fixture
def run(server: Server, make_run: Callable[..., Any], read_state: Callable[..., Any]) -> Any:
    return make_run(*read_state(server.model))


@pytest.fixture
async def install(server: Server, run: Any) -> AsyncIterator[InstallSocket]:
    found = InstallSocket(server.install, run)
    await found.start()
    yield found
    await found.close()


@pytest.fixture
async def installer(server: Server, run: Any, install: InstallSocket) -> AsyncIterator[EngineInstaller]:
    """A peer that has just started, beside an engine that may have run for long."""
    found = EngineInstaller(VllmServer(server.url), install, run=str(run.folder))
    try:
        await found.start()
        yield found
    finally:
        await found.close()


def clean(found: Audit) -> bool:
    return not found.wrong and not found.unknown


async def test_versions_installed_under_load_equal_fresh_engines(
    server: Server, run: Any, installer: EngineInstaller, tmp_path: Path
) -> None:
    assert not installer.ready
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    assert (installer.ready, installer.committed) == (True, run.version)
    assert clean(await installer.audit(run.layout, run.digests))
    folders, texts, recomputed = [], [], []
    async with one_off_connections() as http:
        began, enough = [asyncio.Event() for _ in range(4)], asyncio.Event()
        streams = [asyncio.create_task(load(http, server.url, f"w{10 + i}", e, enough)) for i, e in enumerate(began)]
        await asyncio.gather(*(e.wait() for e in began))
        for seed in range(4):
            run.step(seed, share=0.05, bits=0x0180)
            if seed == 2:  # the rest on an idle engine, since batches change rounding
                enough.set()
                assert min(await asyncio.gather(*streams)) >= 1
            await installer.stage(run.version, run.shadow.path)
            report = await installer.commit(run.version)
            recomputed.append(report.recomputed_tokens or 0)
            assert installer.committed == run.version
            if seed >= 2:
                folders.append(run.save(server.model, tmp_path / f"v{seed}"))
                texts.append([await complete(http, server.url, p) for p in PROMPTS])
        assert sum(recomputed[:2]) > 0  # running requests were recomputed
        async with http.get(server.url + "/weight_info") as response:
            assert (await response.json())["weight_version"] == str(run.version)
    assert clean(await installer.audit(run.layout, run.digests))
    prepared = [r for r in run.reports if r["phase"] == "prepare" and r["rank"] == 0]
    assert [r["install"] for r in prepared] == ["dense", "sparse", "sparse", "sparse", "sparse"]
    expected = await asyncio.to_thread(fresh, folders, PROMPTS)
    assert texts == expected
    assert len({tuple(t) for t in texts}) == 2


async def test_schedules_of_sparse_attention_hold_from_their_versions_commit(
    server: Server, run: Any, installer: EngineInstaller, tmp_path: Path
) -> None:
    """A version without one is dense again, a malformed one is refused, and a failed commit keeps the earlier one."""
    prompt = " ".join(f"w{(7 * i) % 500}" for i in range(200))
    found = []

    async def install() -> None:
        await installer.stage(run.version, run.shadow.path)
        await installer.commit(run.version)
        async with one_off_connections() as http:
            answer = await choice(http, server.url, prompt, logprobs=1)
        found.append(answer["logprobs"]["token_logprobs"])

    await install()
    assert installer.abilities.follows_schedules()
    # Versions 0.1 and 0.2 have the same weights, and 4 pages of 32 tokens instead of 7; so has 0.3, and is dense.
    for schedule in (BudgetSchedule((1,)).to_bytes(), BudgetSchedule((1,)).to_bytes(), None):
        run.step(5, share=0.01, bits=0x0001)
        run.step(5, share=0.01, bits=0x0001)
        if schedule is not None:
            run.schedules[run.version] = schedule
        await install()
    assert found[0] == found[3]
    assert found[1] == found[2]
    # The prompt itself is dense.
    assert found[0][0] == found[1][0]
    assert found[0] != found[1]
    run.step(5, share=0.01, bits=0x0001)
    run.schedules[run.version] = b'{"values": [0]}'
    with pytest.raises(LocalError, match="a schedule has values, page_tokens and bin_tokens"):
        await installer.stage(run.version, run.shadow.path)


async def test_restarted_peer_continues_from_the_engines_version(
    server: Server, run: Any, install: InstallSocket, installer: EngineInstaller
) -> None:
    """The engine still holds a version of the last test's run, with the same number and other bytes, which must not be
    a base.
    """
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    run.step(77, share=0.5, bits=0x0101)
    again = EngineInstaller(VllmServer(server.url), install, run=str(run.folder))
    await again.start()
    assert (again.committed, again.ready) == (None, False)
    await again.stage(run.version, run.shadow.path)
    await again.commit(run.version)
    assert clean(await again.audit(run.layout, run.digests))
    await again.close()
    assert [r["install"] for r in run.reports if r["phase"] == "prepare" and r["rank"] == 0] == ["dense", "sparse"]


async def test_rollback_restores_every_value(
    server: Server, run: Any, installer: EngineInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    old, digests = run.version, run.digests
    run.step(6, share=0.3)
    await installer.stage(run.version, run.shadow.path)
    monkeypatch.setattr(
        installer._machine, "_in_core", lambda reports: False
    )  # an engine with several cores switches over vLLM's routes
    monkeypatch.setattr(installer._ranks, "_collect", losing_commits(installer._ranks._collect))
    with pytest.raises(RetryableError, match="a rank was lost"):
        await installer.commit(run.version)
    monkeypatch.undo()
    assert (installer.ready, installer.committed) == (False, old)
    assert [r["held"] for r in run.reports if r["phase"] == "abort" and r["rank"] == 0] == [str(old)]
    async with one_off_connections() as http:
        assert await complete(http, server.url, PROMPTS[0])
    assert clean(await installer.audit(run.layout, digests))
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    assert clean(await installer.audit(run.layout, run.digests))


def losing_commits(collect: Callable[..., Any]) -> Callable[..., Any]:
    """All ranks here have committed, but one rank elsewhere has not."""

    async def lose(expectation: Any, phase: str, deadline_s: float) -> Any:
        reports = await collect(expectation, phase, deadline_s)
        if phase == "commit":
            raise RetryableError("a rank was lost")
        return reports

    return lose


async def test_refused_version_leaves_the_old_version_running(
    server: Server, run: Any, installer: EngineInstaller
) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    old, digests = run.version, run.digests
    version = run.step(5)
    damaged = run.folder / "damaged"
    damaged.write_bytes(run.shadow.patch_path(version).read_bytes()[:-9])
    run.serve = [damaged]
    with pytest.raises(IntegrityError):
        await installer.stage(version, run.shadow.path)
    assert not installer.ready
    async with one_off_connections() as http:
        assert await complete(http, server.url, PROMPTS[0])
        async with http.get(server.url + "/is_paused") as response:
            assert (await response.json())["is_paused"] is False
    assert installer.committed == old
    assert clean(await installer.audit(run.layout, digests))
    run.serve = None
    await installer.stage(version, run.shadow.path)
    await installer.commit(version)
    assert installer.ready
    assert clean(await installer.audit(run.layout, run.digests))


ATTEMPTS = 8
"""Attempts to switch during a running request, on a possibly busy machine."""


async def test_running_request_continues_with_the_new_weights_only(
    server: Server, run: Any, installer: EngineInstaller
) -> None:
    """With kv=recompute, tokens after a switch equal the new weights' tokens for the whole preceding text."""
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    for attempt in range(ATTEMPTS):
        run.step(31 + attempt, share=0.5, bits=0x0180)
        await installer.stage(run.version, run.shadow.path)
        if await _switched_in_mid_request(server, run, installer):
            return
    raise AssertionError("the switch came after the request in every attempt")


async def _switched_in_mid_request(server: Server, run: Any, installer: EngineInstaller) -> bool:
    """False if the request ended before the switch."""
    async with one_off_connections() as http:
        ids: list[int] = []
        at: list[int] = []

        async def switch() -> None:
            await installer.commit(run.version)
            at.append(len(ids))

        body = {"model": "m", "prompt": [50, 60, 70], "max_tokens": 250, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        async with asyncio.TaskGroup() as group, http.post(server.url + "/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice["token_ids"] or []
                    if len(ids) == 5:
                        group.create_task(switch())
        assert len(ids) == 250
        if at[0] >= 225:
            return False
        body |= {"stream": False, "prompt": [50, 60, 70, *ids[:225]], "max_tokens": 25}
        async with http.post(server.url + "/v1/completions", json=body) as response:
            again = (await response.json())["choices"][0]["token_ids"]
    assert again == ids[225:]
    return True


async def test_commit_without_stage_is_refused(run: Any, installer: EngineInstaller) -> None:
    with pytest.raises(LocalError, match="isn't staged"):
        await installer.commit(run.version)


async def test_unreachable_server_is_retryable(run: Any, tmp_path: Path) -> None:
    install = InstallSocket(tmp_path / "s", run)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        installer = EngineInstaller(VllmServer(f"http://127.0.0.1:{unused.getsockname()[1]}"), install)
        with pytest.raises(RetryableError, match="is the server up"):
            await installer.start()
    await installer.close()
