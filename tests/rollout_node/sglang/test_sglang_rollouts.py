"""Samples of a real SGLang through its generate route: spans and log-probabilities are those of the weights that made
the tokens, and a ledger accepts what `p2pcast work` hands in.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from ledger_stage import config_of, running
from parity_task import NAME, Parity
from real_server import make_model, one_off_connections
from real_sglang import SglangServer
from stored_run import state_of

from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.sglang_server import SglangServer as Routes
from rollout_node.worker import sglang_form
from rollout_node.worker.auditor import LARGEST
from rollout_node.worker.sglang_sampler import SglangSampler
from tests.environments import ROOT
from tests.support.until import until
from trainer_node.ledger_server.callers import WORKER_FILE

REFERENCE = Path(__file__).parents[1] / "vllm" / "reference_logprobs.py"
VOCABULARY = Parity.vocabulary
END, STOP = 2, 5
"""The end token of the model's own configuration, and a stop token of requests."""
FLAT = 100.0
"""A temperature at which all tokens are about equally likely."""
LONG = 200
ATTEMPTS = 8
END_S = 600.0


def manifest_of(version: Version) -> bytes:
    return str(version).encode().ljust(32, b"-")


class Labels:
    """Versions by the engine's labels alone."""

    def __init__(self, salt: str | None = None) -> None:
        self.salt = salt

    async def span(self, label: str) -> Span:
        version = Version.parse(label)
        return Span(version, 0, 0, manifest_of(version), "recompute")


@pytest.fixture(
    scope="module",
    params=[(), pytest.param(("--incremental-streaming-output",), marks=pytest.mark.prove)],
    ids=["all tokens", "new tokens"],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("sglang")
    model = make_model(folder / "model", vocabulary=VOCABULARY)
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == END
    with SglangServer(model, folder / "server", *request.param) as found:
        yield found


@pytest.fixture
def run(server: SglangServer, make_run: Callable[..., Any]) -> Any:
    return make_run(*state_of(server.model))


@pytest.fixture
async def installer(server: SglangServer, run: Any) -> AsyncIterator[EngineInstaller]:
    """The first version is installed."""
    socket = InstallSocket(server.install, run)
    await socket.start()
    found = EngineInstaller(Routes(server.url), socket, run=str(run.folder))
    try:
        await found.start()
        await install(found, run)
        yield found
    finally:
        await found.close()
        await socket.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with one_off_connections() as found:
        yield found


@pytest.fixture
def sampler(http: aiohttp.ClientSession, server: SglangServer, installer: EngineInstaller) -> SglangSampler:
    return SglangSampler(http, server.url, Labels())


async def install(installer: EngineInstaller, run: Any) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)


async def sampled(
    sampler: SglangSampler, prompt: Sequence[int], tokens: int = 40, temperature: float = 1.0, stop: Sequence[int] = ()
) -> Sample:
    return await sampler.sample(prompt, seed=7, temperature=temperature, max_tokens=tokens, stop_token_ids=stop)


async def sampled_across(
    sampler: SglangSampler, installer: EngineInstaller, version: Version, prompts: list[list[int]], temperature: float
) -> list[Sample]:
    """Samples during which the engine switches to ``version``, once tokens come."""
    began = asyncio.Event()
    counting = sampler.of_play(lambda count: began.set())
    async with asyncio.TaskGroup() as group:
        samples = [group.create_task(sampled(counting, prompt, LONG, temperature)) for prompt in prompts]
        await began.wait()
        await installer.commit(version)
    return [sample.result() for sample in samples]


async def loads(http: aiohttp.ClientSession, server: SglangServer) -> tuple[int, float]:
    """Running requests, and steps of decoding since the start."""
    async with http.get(server.url + "/v1/loads") as answer:
        (row,) = (await answer.json())["loads"]
        return row["num_running_reqs"], (row["decode_moments"] or [0.0])[0]


def reference(folders: list[Path], prompts: list[list[int]], samples: list[Sample], temperature: float) -> Any:
    """For each folder and sample, the log-probability of every sampled token."""
    asked = [[[*prompt, *sample.token_ids], temperature] for prompt, sample in zip(prompts, samples, strict=True)]
    command = [sys.executable, str(REFERENCE), *map(str, folders)]
    done = subprocess.run(command, input=json.dumps(asked), text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return [[np.array(row[len(prompt) - 1 :]) for row, prompt in zip(rows, prompts, strict=True)] for rows in found]


async def test_spans_and_logprobs_belong_to_the_weights_that_made_the_tokens(
    server: SglangServer, run: Any, installer: EngineInstaller, sampler: SglangSampler, tmp_path: Path
) -> None:
    temperature, prompts = 0.7, [[3, 4], [5, 6, 7]]
    assert await sampler.check() == "0.0"
    for attempt in range(ATTEMPTS):
        folders = {run.version: run.save(server.model, tmp_path / f"old{attempt}")}
        run.step(attempt, share=0.05, bits=0x0180)
        folders[run.version] = run.save(server.model, tmp_path / f"new{attempt}")
        await installer.stage(run.version, run.shadow.path)
        found = await sampled_across(sampler, installer, run.version, prompts, temperature)
        if any(len(one.spans) == 2 for one in found):
            break
    else:
        raise AssertionError("the switch came after the samples in every attempt")
    said = await asyncio.to_thread(reference, list(folders.values()), prompts, found, temperature)
    for number, one in enumerate(found):
        assert (len(one.token_ids), one.stop) == (LONG, "length")
        assert [span.version for span in one.spans] == sorted({span.version for span in one.spans})
        for span in one.spans:
            own, other = said if span.version == min(folders) else said[::-1]
            logprobs = np.array(one.logprobs[span.start : span.end])
            off = np.abs(logprobs - own[number][span.start : span.end]).mean()
            others = np.abs(logprobs - other[number][span.start : span.end]).mean()
            assert off < 0.2 * others, (number, span, off, others)


async def test_scores_tell_the_weights_that_sampled_from_others(
    run: Any, installer: EngineInstaller, sampler: SglangSampler
) -> None:
    prompt = [3, 4, VOCABULARY - 1]
    one = await sampled(sampler, prompt)

    async def gaps() -> np.ndarray:
        scores, version = await sampler.score([*prompt, *one.token_ids])
        assert version == run.version
        assert scores[0] == 0.0
        return np.abs(scores[len(prompt) :] - np.array(one.logprobs))

    own = await gaps()
    assert own.mean() < 0.05
    assert own.max() < LARGEST
    run.step(90, share=0.05, bits=0x0180)
    await install(installer, run)
    assert own.mean() < 0.2 * (await gaps()).mean()


async def test_samples_end_at_their_stop_tokens_alone(sampler: SglangSampler) -> None:
    found: list[Sample] = []
    while not any(END in one.token_ids for one in found):  # by chance: SGLang samples without the seed
        assert len(found) < 512, "the model's end token is a token like others"
        found += await asyncio.gather(*[sampled(sampler, [3], 60, FLAT, [STOP, 6]) for _ in range(16)])
    for one in found:
        assert not {STOP, 6} & set(one.token_ids[:-1])
        assert one.stop == ("end" if one.token_ids[-1] in (STOP, 6) else "length")
        assert one.stop == "end" or len(one.token_ids) == 60
        assert [(span.start, span.end) for span in one.spans] == [(0, len(one.token_ids))]
        assert np.abs(np.array(one.logprobs) + np.log(VOCABULARY)).max() < 0.5


async def test_samples_of_one_seed_differ(sampler: SglangSampler) -> None:
    """SGLang heeds seeds only with --enable-deterministic-inference, which it does not offer on a CPU."""
    found = [await sampled(sampler, [3], 40, FLAT) for _ in range(2)]
    assert found[0].token_ids != found[1].token_ids


async def test_a_cancelled_sample_ends_at_the_engine(
    http: aiohttp.ClientSession, server: SglangServer, sampler: SglangSampler
) -> None:
    _, before = await loads(http, server)
    began = asyncio.Event()
    asked = asyncio.create_task(sampled(sampler.of_play(lambda count: began.set()), [3], 250))
    await began.wait()
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    await until(lambda: loads(http, server), holds=lambda found: not found[0])
    await sampled(sampler, [4], 1)
    assert (await loads(http, server))[1] - before < 200


async def test_a_paused_engine_keeps_samples_waiting(
    http: aiohttp.ClientSession, server: SglangServer, installer: EngineInstaller, sampler: SglangSampler
) -> None:
    routes = Routes(server.url)
    routes.open()
    await routes.pause(clear_cache=True)
    asked = asyncio.create_task(sampled(sampler, [3], 4))
    await loads(http, server)
    assert not asked.done()
    await routes.resume()
    await routes.close()
    assert len((await asked).token_ids) == 4


async def test_the_naming_salt_keeps_cached_prefixes_apart(
    http: aiohttp.ClientSession, server: SglangServer, installer: EngineInstaller
) -> None:
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15, 7, 9, 11]

    async def cached(salt: str | None) -> int:
        body = sglang_form.request(
            prompt, seed=0, temperature=1.0, max_tokens=1, stop_token_ids=(), extra_key=salt, stream=False
        )
        async with http.post(server.url + "/generate", json=body) as answer:
            return int((await answer.json())["meta_info"]["cached_tokens"])

    await sampled(SglangSampler(http, server.url, Labels("salt")), prompt, 1)
    assert (await cached("salt"), await cached("other"), await cached(None)) == (len(prompt) - 1, 0, 0)


async def test_a_prompt_that_does_not_fit_is_refused_with_its_reason(sampler: SglangSampler) -> None:
    with pytest.raises(RemoteError, match="maximum context length of 256"):
        await sampled(sampler, [3], 1000)
    with pytest.raises(RemoteError, match="longer than the model's context"):
        await sampler.score([3] * 300)


# -- a ledger, and `p2pcast work`


class Peer:
    """The HTTP server of a peer, for one installer."""

    def __init__(self, installer: EngineInstaller) -> None:
        self._installer = installer

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_get("/versions", self._versions)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _versions(self, request: web.Request) -> web.Response:
        version = self._installer.committed
        assert version is not None
        engines = {self._installer.name: str(version), "safetensors:elsewhere": "0.0"}
        manifests = {str(version): manifest_of(version).hex()}
        return web.json_response(
            {
                "run": "ab" * 16,
                "node": "e0" * 16,
                "kv": "recompute",
                "staged": None,
                "engines": engines,
                "manifests": manifests,
            }
        )


async def command(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "p2pcast.cli", *words, "--sampler", "sglang", cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def test_a_ledger_accepts_results_and_an_auditor_agrees(
    server: SglangServer, run: Any, installer: EngineInstaller, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    async with asyncio.timeout(END_S), running(config_of(folder)) as daemon, Peer(installer) as peer:
        url = f"127.0.0.1:{daemon.http.address[1]}"
        learner = BatchClient(f"http://{url}", bearer_file=folder / "http.token", give_up_s=END_S)
        await asyncio.to_thread(learner.resume, 0, 0)
        await asyncio.to_thread(learner.publish, run.version, manifest_of(run.version))
        where = ("--engine", server.url, "--peer", peer)
        worker = await command("work", url, *where, "--task", NAME, "--bearer-file", str(folder / WORKER_FILE))
        try:
            batch = await asyncio.to_thread(learner.take, 0)
            assert batch is not None
            auditor = await command("audit", url, *where, "--bearer-file", str(folder / "http.token"), "--count", "2")
            said, _ = await auditor.communicate()
            assert (auditor.returncode, "2 agrees" in said.decode()) == (0, True), said.decode()
        finally:
            worker.terminate()
            text, _ = await worker.communicate()
        assert worker.returncode == 0, text.decode()
    results = [rollout.result for group in batch.groups for rollout in group.rollouts]
    assert len(results) >= 2
    for result in results:
        assert {(span.version, span.manifest) for span in result.spans} == {(run.version, manifest_of(run.version))}
