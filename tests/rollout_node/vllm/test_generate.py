"""Samples of a real vLLM through its generate route: spans and log-probabilities are those of the weights that made
the tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_server import Server, make_model, one_off_connections

from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.probe_set import ProbeSet, packed_scores, unpacked_scores
from p2pcast.rollouts.result import Result, Span, fault
from p2pcast.tasks.play import result_of
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Trajectory
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.vllm_server import VllmServer
from rollout_node.worker import recomputation
from rollout_node.worker.completions_sampler import CompletionsSampler
from rollout_node.worker.engine_versions import ServingEpoch
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.recomputation import Gaps
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.probing.learner_scores import learner_scores
from trainer_node.learning.probing.probe_rule import FLOOR_VERSIONS, ProbeRule, divergence
from trainer_node.learning.trainer_ranks import TrainerRanks

pytestmark = pytest.mark.vllm

VOCABULARY = 500
ALONE = TrainerRanks(0, 1, torch.device("cpu"))
TEMPERATURE = 0.7
ATTEMPTS = 8
CHUNK = 128
"""Tokens of a step: longer prompts are computed in chunks."""
FLAGS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-num-batched-tokens", str(CHUNK)]


class Labels:
    """Versions by the engine's labels alone."""

    salt: str | None = None

    async def span(self, label: str) -> Span:
        return Span(Version.parse(label), 0, 0, label.encode().ljust(32, b"-"), "recompute")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("vllm")
    with Server(make_model(folder / "model"), folder, *FLAGS) as found:
        yield found


@pytest.fixture
def run(server: Server, make_run: Callable[..., Any], read_state: Callable[..., Any]) -> Any:
    return make_run(*read_state(server.model))


class ServingEpochs:
    """Versions by the installer alone."""

    def __init__(self, installer: EngineInstaller) -> None:
        self._installer = installer

    async def serving_epoch(self) -> ServingEpoch:
        epoch, version = self._installer.abilities.serving_epoch(), self._installer.committed
        if epoch is None or version is None:
            raise RetryableError("weights are written")
        return ServingEpoch(epoch, Span(version, 0, 0, bytes(32), "drain"))


@pytest.fixture
async def installer(server: Server, run: Any, request: pytest.FixtureRequest) -> AsyncIterator[EngineInstaller]:
    install = InstallSocket(server.install, run)
    await install.start()
    found = EngineInstaller(
        VllmServer(server.url), install, run=str(run.folder), safe_point=getattr(request, "param", "step")
    )
    try:
        await found.start()
        yield found
    finally:
        await found.close()
        await install.close()


class LongSums(Sums):
    """Plays go on to their limit, among the tokens of a larger model."""

    vocabulary = VOCABULARY
    stop_token_ids = ()  # type: ignore[assignment]


TASK = LongSums()


def job(seed: int, max_tokens: int, temperature: float = TEMPERATURE) -> Job:
    group = Group(
        id=bytes(16),
        size=1,
        purpose="train",
        task=TASK.name,
        task_hash=TASK.hash,
        prompt=next(TASK.jobs(seed)).prompt,
        seed=seed,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    return job_of(group, 0, bytes(16), Version(0, 0))


def reference(folders: list[Path], plays: list[Trajectory]) -> list[list[np.ndarray]]:
    """For each folder and play, the log-probability of every token; the first token's is 0."""
    command = [sys.executable, str(Path(__file__).with_name("reference_logprobs.py")), *map(str, folders)]
    asked = json.dumps([[play.token_ids.tolist(), TEMPERATURE] for play in plays])
    done = subprocess.run(command, input=asked, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[np.array([0.0, *row]) for row in rows] for rows in json.loads(done.stdout.strip().splitlines()[-1])]


async def test_spans_and_logprobs_belong_to_the_weights_that_made_the_tokens(
    server: Server, run: Any, installer: EngineInstaller, tmp_path: Path
) -> None:
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        await installer.stage(run.version, run.shadow.path)
        await installer.commit(run.version)
        assert await sampler.check() == str(run.version)
        for attempt in range(ATTEMPTS):
            folders = {run.version: run.save(server.model, tmp_path / f"old{attempt}")}
            run.step(attempt + 50, share=0.05, bits=0x0180)
            folders[run.version] = run.save(server.model, tmp_path / f"new{attempt}")
            await installer.stage(run.version, run.shadow.path)
            plays = await played_across(sampler, installer, run.version)
            if any(len(play.spans) == 2 for play in plays):
                break
        else:
            raise AssertionError("the switch came after the plays in every attempt")
        plays += [await TASK.play(sampler, job(seed, 40)) for seed in range(10, 13)]  # by the new version alone
    found = dict(zip(folders, await asyncio.to_thread(reference, list(folders.values()), plays), strict=True))
    for number, play in enumerate(plays):
        result = result_of(job(number, 200), bytes(16), play, 0.0)
        assert fault(result, VOCABULARY) is None
        assert [span.version for span in play.spans] == sorted({span.version for span in play.spans})
        for span in play.spans:
            said = play.logprobs[span.start : span.end]
            (other,) = set(folders) - {span.version}
            off = np.abs(said - found[span.version][number][span.start : span.end]).mean()
            others = np.abs(said - found[other][number][span.start : span.end]).mean()
            assert off < 0.2 * others, (number, span, off, others)
    assert all(play.spans[-1].version == run.version for play in plays[-3:])


async def played_across(sampler: GenerateSampler, installer: EngineInstaller, version: Version) -> list[Trajectory]:
    """Plays during which the engine switches to ``version``, once tokens come."""
    began = asyncio.Event()
    counting = sampler.of_play(lambda count: began.set())
    async with asyncio.TaskGroup() as group:
        plays = [group.create_task(TASK.play(counting, job(seed, 200))) for seed in range(2)]
        await began.wait()
        await installer.commit(version)
    return [play.result() for play in plays]


async def test_recomputed_logprobs_tell_the_weights_that_sampled_from_others(
    server: Server, run: Any, installer: EngineInstaller
) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        jobs = [job(seed, 40, 1.0) for seed in range(20, 23)]
        results = [result_of(one, bytes(16), await TASK.play(sampler, one), 0.0) for one in jobs]
        assert [recomputation.obstacle(result) for result in results] == [None] * 3
        own = [await recomputed_gaps(sampler, result) for result in results]
        run.step(90, share=0.05, bits=0x0180)
        await installer.stage(run.version, run.shadow.path)
        await installer.commit(run.version)
        others = [await recomputed_gaps(sampler, result) for result in results]
    for same, other in zip(own, others, strict=True):
        assert same.mean < 0.2 * other.mean, (same, other)


async def recomputed_gaps(sampler: GenerateSampler, result: Result) -> Gaps:
    scores, _ = await sampler.score(result.token_ids.tolist())
    return recomputation.gaps(result, scores)


OLD, SHARE, BITS = 20, 0.05, 0x0040
"""Versions by which one tensor of an engine lags. Of each version, the share of words that change, and how."""
HIDDEN = "layers.1.self_attn."
"""Tensors whose age this random model hides behind the numerics of bfloat16: of the last attention."""


@pytest.mark.parametrize("installer", ["step", "drain"], indirect=True)
async def test_probes_notice_a_tensor_that_is_many_versions_old(
    server: Server, run: Any, installer: EngineInstaller, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A real engine scores right weights. The learner's scores with one old tensor are as far from them as those of an
    engine with an old tensor from the learner's.
    """
    drawn = random.Random(4)
    probe_set = ProbeSet.checked([[drawn.randrange(3, VOCABULARY) for _ in range(96)] for _ in range(16)])
    rule, floors, words = ProbeRule(), [], [dict[str, torch.Tensor]()]
    async with one_off_connections() as http:
        sampler: GenerateSampler | CompletionsSampler = GenerateSampler(http, server.url, Labels())
        if request.node.callspec.params["installer"] == "drain":
            sampler = CompletionsSampler(http, server.url, ServingEpochs(installer))
        for number in range(OLD + 1):
            await installer.stage(run.version, run.shadow.path)
            await installer.commit(run.version)
            if number < FLOOR_VERSIONS or number == OLD:
                found = [await sampler.score(sequence) for sequence in probe_set.sequences]
                assert {version for _, version in found} == {run.version}
                engine = unpacked_scores(packed_scores([logprobs[1:] for logprobs, _ in found]))
                model = LearnerModel(run.save(server.model, tmp_path / f"v{number}"), ALONE)
                kl = divergence(learner_scores(model, probe_set, 512, "packed"), engine)
                judged = rule.judge(run.version, kl)
                assert not judged.alarm
                floors.append(kl)
            if number == 0:
                words = [{name: p.detach().clone() for name, p in model.parameters.items()}]
            if number < OLD:
                run.step(200 + number, share=SHARE, bits=BITS)
    assert judged.floor is not None
    alarms = {}
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            new = parameter.clone()
            parameter.copy_(words[0][name])
            alarms[name] = rule.judge(run.version, divergence(learner_scores(model, probe_set, 512, "packed"), engine))
            parameter.copy_(new)
    print(f"floor {judged.floor:.2e}, of {floors}")
    for name, found_alarm in alarms.items():
        print(f"{found_alarm.kl / judged.floor:8.1f} x the floor: {name}")
    assert len(alarms) == 25
    assert [name for name, one in alarms.items() if not one.alarm and HIDDEN not in name] == []


@pytest.mark.parametrize("installer", ["drain"], indirect=True)
async def test_each_request_of_a_draining_engine_has_one_version(
    server: Server, run: Any, installer: EngineInstaller, tmp_path: Path
) -> None:
    """Requests run on while two versions are committed. The engine's own spans, of its other route, say the same."""
    plays: list[Trajectory] = []
    began, enough = asyncio.Event(), asyncio.Event()
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    folders = {run.version: run.save(server.model, tmp_path / "v0")}
    async with one_off_connections() as http, asyncio.TaskGroup() as group:
        completions = CompletionsSampler(http, server.url, ServingEpochs(installer))
        assert await completions.check() == str(run.version)
        samplers: list[Any] = [completions, completions, GenerateSampler(http, server.url, Labels())] * 2
        for number, sampler in enumerate(samplers):
            counting = sampler.of_play(lambda count: began.set())
            group.create_task(play_until(enough, counting, 100 * number, plays))
        for step in (60, 61):
            run.step(step, share=0.05, bits=0x0180)
            folders[run.version] = run.save(server.model, tmp_path / f"v{step}")
            await installer.stage(run.version, run.shadow.path)
            began.clear()
            await began.wait()
            report = await installer.commit(run.version)
            assert report.detail["drained_s"] > 0
        began.clear()
        await began.wait()
        enough.set()
    assert {span.version for play in plays for span in play.spans} == set(folders)
    found = dict(zip(folders, await asyncio.to_thread(reference, list(folders.values()), plays), strict=True))
    for number, play in enumerate(plays):
        (span,) = play.spans
        said = play.logprobs[span.start : span.end]
        off = {v: np.abs(said - rows[number][span.start : span.end]).mean() for v, rows in found.items()}
        named = off.pop(span.version)
        assert named < 0.2 * min(off.values()), (number, span, named, off)


async def play_until(
    enough: asyncio.Event, sampler: CompletionsSampler | GenerateSampler, seed: int, plays: list[Trajectory]
) -> None:
    while not enough.is_set():
        plays.append(await TASK.play(sampler, job(seed, 60)))
        seed += 1


@pytest.mark.parametrize("installer", ["drain"], indirect=True)
async def test_an_endless_request_costs_the_commit_and_not_the_engine(
    server: Server, run: Any, installer: EngineInstaller
) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    old, began = run.version, asyncio.Event()
    run.step(70, share=0.05, bits=0x0180)
    await installer.stage(run.version, run.shadow.path)
    installer._server.deadlines = Deadlines(drain=0.01)
    async with one_off_connections() as http, asyncio.TaskGroup() as group:
        counting = GenerateSampler(http, server.url, Labels()).of_play(lambda count: began.set())
        playing = group.create_task(TASK.play(counting, job(1, 200)))
        await began.wait()
        with pytest.raises(RetryableError, match="did not end within"):
            await installer.commit(run.version)
        assert (installer.committed, installer.ready) == (old, True)
    assert [span.version for span in playing.result().spans] == [old]
    installer._server.deadlines = Deadlines()
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    assert installer.committed == run.version


async def test_equal_seeds_give_equal_plays(server: Server, run: Any, installer: EngineInstaller) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        first, second, other = [(await TASK.play(sampler, job(seed, 30))).token_ids.tolist() for seed in (1, 1, 2)]
    assert first == second
    assert first != other


async def test_the_chunks_of_a_long_prompt_do_not_change_a_seeded_sample(
    server: Server, run: Any, installer: EngineInstaller
) -> None:
    """The second time the prompt is in the prefix cache, and is computed in a single step."""
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    drawn = random.Random(6)
    prompt = [drawn.randrange(3, VOCABULARY) for _ in range(CHUNK + 64)]
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        first, second, other = [
            await sampler.sample(prompt, seed=seed, temperature=1.0, max_tokens=30, stop_token_ids=())
            for seed in (3, 3, 4)
        ]
    assert list(first.token_ids) == list(second.token_ids) != list(other.token_ids)


async def test_a_stop_token_ends_the_sample_at_the_engine(server: Server, run: Any, installer: EngineInstaller) -> None:
    await installer.stage(run.version, run.shadow.path)
    await installer.commit(run.version)
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        free = await sampler.sample([1, 2], seed=3, temperature=1.0, max_tokens=20, stop_token_ids=())
        stop = free.token_ids[7]
        found = await sampler.sample([1, 2], seed=3, temperature=1.0, max_tokens=20, stop_token_ids=[stop])
    assert found.stop == "end"
    assert found.token_ids == free.token_ids[: list(free.token_ids).index(stop) + 1]


@pytest.mark.prove  # tests/rollout_node/worker/test_generate_sampler.py is the sample
async def test_a_server_without_the_flags_is_refused_with_the_flag_to_set(server: Server, tmp_path: Path) -> None:
    """The last test: it restarts the server."""
    async with one_off_connections() as http:
        sampler = GenerateSampler(http, server.url, Labels())
        for flags, why in (
            (["--enable-scale-out"], "--logprobs-mode processed_logprobs"),
            (["--logprobs-mode", "processed_logprobs"], "--enable-scale-out"),
        ):
            server.restart(*flags)
            await asyncio.to_thread(server.wait)
            with pytest.raises(LocalError, match=why):
                await sampler.check()
        server.stop()
        with pytest.raises(RetryableError, match="does not answer"):
            await sampler.check()
