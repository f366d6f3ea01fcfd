"""A real SGLang server, driven over HTTP as a peer drives it, and fresh servers to compare with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_server import make_model, one_off_connections
from real_sglang import TWO_RANKS, SglangServer, generate, make_zoo_model
from stored_run import state_of

from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Audit
from rollout_node.installers.sglang_server import SglangServer as Routes
from tests.support.until import until

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]


# Ranks and model.
CASES = [
    (1, "dense"),
    *(pytest.param(case, marks=pytest.mark.prove) for case in [(2, "dense"), (1, "moe"), (2, "moe")]),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("sglang")
    ranks, kind = request.param
    model = make_model(folder / "model") if kind == "dense" else make_zoo_model(folder, kind)
    environment = TWO_RANKS if ranks == 2 else None
    options = ["--tp-size", str(ranks), "--weight-version", "0.0"]
    with SglangServer(model, folder / "server", *options, environment=environment) as found:
        yield found


@pytest.fixture
async def installer(server: SglangServer, make_run: Callable[..., Any]) -> AsyncIterator[Any]:
    run = make_run(*state_of(server.model))
    socket = InstallSocket(server.install, run)
    await socket.start()
    found = EngineInstaller(Routes(server.url), socket, run=str(run.folder))
    try:
        await found.start()
        yield found, run
    finally:
        await found.close()
        await socket.close()


def clean(found: Audit) -> bool:
    return not found.wrong and not found.unknown


def fresh(folders: list[Path], like: SglangServer) -> list[Any]:
    """Greedy answers, with their log-probabilities, of a server started from each folder."""

    async def answers(server: SglangServer) -> list[Any]:
        async with one_off_connections() as http:
            return [said(await generate(http, server.url, prompt)) for prompt in PROMPTS]

    found = []
    for number, folder in enumerate(folders):
        server = SglangServer(folder, like.log.parent / f"fresh{number}", *like.options, environment=like.environment)
        try:
            server.wait()
            found.append(asyncio.run(answers(server)))
        finally:
            server.stop()
    return found


def said(answer: dict[str, Any]) -> Any:
    return [(logprob, token) for logprob, token, *_ in answer["meta_info"]["output_token_logprobs"]]


async def until_fault(target: EngineInstaller, said: str) -> None:
    await until(target._pulse.fault, holds=lambda fault: said in str(fault))


async def test_versions_installed_under_load_equal_fresh_servers(
    server: SglangServer, installer: tuple[EngineInstaller, Any], tmp_path: Path
) -> None:
    target, run = installer
    assert not target.ready
    async with one_off_connections() as http:
        body = {"new_version": "0.0", "abort_all_requests": False}
        for _ in range(2):
            before = (await generate(http, server.url, [5], tokens=2))["meta_info"]
            assert [one["version"] for one in before["weight_versions"]] == ["none"], "not what the server was told"
            async with http.post(server.url + "/update_weight_version", json=body) as response:
                assert response.status == 200
    await target.stage(run.version, run.shadow.path)
    await target.commit(run.version)
    assert (target.ready, target.committed) == (True, run.version)
    assert clean(await target.audit(run.layout, run.digests))
    folders, answers = [], []
    async with one_off_connections() as http:
        streams = [asyncio.create_task(generate(http, server.url, [10 + i], tokens=200)) for i in range(4)]
        for seed in range(3):
            run.step(seed, share=0.05, bits=0x0180)
            if seed == 2:
                spans = [answer["meta_info"]["weight_versions"] for answer in await asyncio.gather(*streams)]
            await target.stage(run.version, run.shadow.path)
            await target.commit(run.version)
            assert target.committed == run.version
        folders.append(run.save(server.model, tmp_path / "v3"))
        answers.append([said(await generate(http, server.url, prompt)) for prompt in PROMPTS])
        async with http.get(server.url + "/model_info") as response:
            assert (await response.json())["weight_version"] == str(run.version)
    for versions in spans:
        assert versions[0]["start"] == 0
        assert versions[-1]["end"] == 200
        assert all(one["end"] == other["start"] for one, other in itertools.pairwise(versions))
    assert {one["version"] for versions in spans for one in versions} >= {"0.2"}
    assert clean(await target.audit(run.layout, run.digests))
    prepared = [r for r in run.reports if r["phase"] == "prepare" and r["rank"] == 0]
    assert [r["install"] for r in prepared] == ["dense", "sparse", "sparse", "sparse"]
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if "sglang::scheduler" in " ".join(process.cmdline()):
            process.suspend()
            await until_fault(target, "no sign of life of rank ")
            process.resume()
            await until_fault(target, "None")
    assert await asyncio.to_thread(fresh, folders, server) == answers
