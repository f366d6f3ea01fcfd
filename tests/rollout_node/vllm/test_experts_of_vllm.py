"""A real vLLM returns the experts of its tokens, and a learner that is forced to these experts finds the sampler's
log-probabilities again. Triton's interpreter runs the engine's model runner (``interpreted_triton``).

``pytest -s`` prints the divergence with and without router replay.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import interpreted_triton
import numpy as np
import pytest
import torch
from real_server import Server, one_off_connections

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Rollout, RolloutBatch, RolloutGroup
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.result import Result, Span, fault
from p2pcast.tasks.play import Play, result_of
from p2pcast.tasks.task import Trajectory
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.vllm_server import VllmServer
from rollout_node.worker.generate_sampler import GenerateSampler
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow, rows_of
from trainer_node.learning.trainer_ranks import TrainerRanks

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

MAKER = Path(__file__).with_name("expert_models.py")
FLAGS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--skip-tokenizer-init"]
ROUTED = "--enable-return-routed-experts"
VOCABULARY, LAYERS, TOP_K = 500, 6, 4
PROMPT, ENVIRONMENT_TOKENS = 20, 5
ALONE = TrainerRanks(0, 1, torch.device("cpu"))
GROUP = Group(
    id=bytes(16),
    size=4,
    purpose="train",
    task="turns",
    task_hash=bytes(32),
    prompt=b"",
    seed=0,
    temperature=1.0,
    max_tokens=400,
)


class Labels:
    """Versions by the engine's labels alone; the weights that it began with are 0.0."""

    salt: str | None = None

    async def span(self, label: str) -> Span:
        return Span(Version(0, 0) if label == "none" else Version.parse(label), 0, 0, bytes(32), "recompute")


def model_of(folder: Path, kind: str, steps: int) -> Path:
    command = [sys.executable, str(MAKER), str(folder), kind, str(steps), str(VOCABULARY)]
    subprocess.run(command, check=True, timeout=900)
    return folder


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    server = Server(model, folder, *FLAGS, *(options or (ROUTED,)), **interpreted_triton.options(folder / "triton"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def job(seed: int) -> Job:
    return job_of(GROUP, seed % GROUP.size, seed.to_bytes(16, "big"), Version(0, 0))


async def played(sampler: GenerateSampler, seed: int, turns: Sequence[int]) -> Trajectory:
    """``turns``: sampled tokens of each. The environment speaks between them. The task's own tokens are chosen among
    the few that the trained models know.
    """
    rng = np.random.default_rng(seed)
    play, own = Play(rng.integers(3, 16, PROMPT).tolist()), sampler.of_play(lambda count: None)
    for number, count in enumerate(turns):
        if number:
            play.add_environment(rng.integers(3, 16, ENVIRONMENT_TOKENS).tolist())
        await play.turn(own, job(seed), count, ())
    return play.end("length")


def results_of(plays: Sequence[Trajectory]) -> list[Result]:
    found = [result_of(job(seed), bytes(16), play, 0.0) for seed, play in enumerate(plays)]
    read = [Result.from_bytes(one.to_bytes()) for one in found]
    assert [fault(one, VOCABULARY) for one in read] == [None] * len(read)
    return read


def rows_by(model: LearnerModel, results: Sequence[Result]) -> list[TrainingRow]:
    """As a learner reads a batch."""
    assert model.replay is not None
    rollouts = tuple(Rollout(one, float(number % 2), "w", 0) for number, one in enumerate(results))
    batch = RolloutBatch(bytes(16), 0, (RolloutGroup(GROUP, rollouts),), 1, 0.5)
    return rows_of(
        batch,
        kind="grpo",
        eps=1e-4,
        overlong="keep",
        step=9,
        staleness=9,
        vocabulary=model.vocabulary,
        experts=model.replay.shape,
        expert_layers=model.replay.expert_layers,
    )


class Compared(NamedTuple):
    """``k3``: of KL(sampler || learner) in nats, of each sampled token. ``choices``: tokens × layers × experts."""

    k3: np.ndarray
    log_ratios: np.ndarray
    choices: np.ndarray


def compared(model: LearnerModel, batch: MicroBatch, *, replay: bool) -> Compared:
    choices: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: choices.append(out[2].sort(-1).values))
        for layer in model.module.model.layers
    ]
    with torch.no_grad():
        log_ratios = model.scores(batch, replay=replay).logprobs.double() - batch.sampler_logprobs
    for hook in hooks:
        hook.remove()
    k3 = log_ratios.expm1() - log_ratios
    return Compared(k3.numpy(), log_ratios.numpy(), torch.stack(choices, 1).numpy())


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("moe", 0),
        pytest.param("moe", 25, marks=pytest.mark.prove),
        pytest.param("shared_expert", 0, marks=pytest.mark.prove),
        pytest.param("shared_expert", 25, marks=pytest.mark.prove),
    ],
)
def test_replay_brings_a_learner_nearer_to_the_sampler(tmp_path: Path, kind: str, steps: int) -> None:
    folder, turns = model_of(tmp_path / "model", kind, steps), (12, 12)

    async def play(server: Server) -> list[Trajectory]:
        async with one_off_connections() as http:
            sampler = GenerateSampler(http, server.url, Labels())
            await sampler.check()
            assert sampler.routed_bytes == LAYERS * TOP_K
            return await asyncio.gather(*(played(sampler, seed, turns) for seed in range(8)))

    with served(folder, tmp_path) as server:
        results = results_of(asyncio.run(play(server)))
    tokens = PROMPT + sum(turns) + ENVIRONMENT_TOKENS
    for one in results:
        assert one.routed_experts is not None
        assert one.routed_experts.spans == ((0, tokens - 1),)  # the last token is never computed
    model = LearnerModel(folder, ALONE, router_replay=True)
    rows = rows_by(model, results)
    (batch,) = micro_batches([list(enumerate(rows))], 0, 1 << 14, "packed")
    forced, own = compared(model, batch, replay=True), compared(model, batch, replay=False)
    other = (forced.choices != own.choices).any(-1)
    rerouted = other.any(-1)[batch.logit_positions.numpy()]
    print(f"{kind}, {steps} steps: {rerouted.mean():.1%} of tokens, {other.mean():.2%} of choices differ; KL in nats:")
    for tokens_of, there in (("all tokens", np.ones_like(rerouted)), ("rerouted tokens", rerouted)):
        print(f"{tokens_of}: without replay {own.k3[there].mean():.2e}, with {forced.k3[there].mean():.2e}")
    for number, one in enumerate(results):
        assert one.routed_experts is not None
        begin = number * tokens
        assert (forced.choices[begin : begin + tokens - 1] == one.routed_experts.array()).all()
    assert rerouted.sum() >= 5
    assert forced.k3[rerouted].mean() < 0.5 * own.k3[rerouted].mean()


@pytest.mark.prove
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_experts_over_a_switch_belong_to_the_version_of_each_token(
    tmp_path: Path, make_run: Callable[..., Any], read_state: Callable[..., Any], kv: str
) -> None:
    """Requests run on while another version is committed. Each token's experts are those with which its version
    computed it first, and the learner of that version agrees on the tokens that follow.
    """
    folder = model_of(tmp_path / "model", "moe", 0)
    run = make_run(*read_state(folder))

    async def play(server: Server) -> tuple[list[Trajectory], list[Trajectory], Version]:
        install = InstallSocket(server.install, run)
        await install.start()
        installer = EngineInstaller(VllmServer(server.url), install, run=str(run.folder), kv=kv)
        began = asyncio.Event()
        try:
            await installer.start()
            await installer.stage(run.version, run.shadow.path)
            await installer.commit(run.version)
            async with one_off_connections() as http, asyncio.TaskGroup() as group:
                sampler = GenerateSampler(http, server.url, Labels())
                await sampler.check()
                counting = GenerateSampler(http, server.url, Labels(), lambda count: began.set())
                watched = group.create_task(counting.sample([3, 4, 5], **SAMPLING, max_tokens=60))
                across = [group.create_task(played(sampler, seed, (40, 8))) for seed in range(4)]
                await began.wait()
                run.step(50, share=0.05, bits=0x0040)
                await installer.stage(run.version, run.shadow.path)
                await installer.commit(run.version)
            async with one_off_connections() as http:
                sampler = GenerateSampler(http, server.url, Labels())
                sampler.routed_bytes = LAYERS * TOP_K
                after = await asyncio.gather(*(played(sampler, seed, (8, 8)) for seed in range(20, 24)))
            assert watched.result().experts is not None
        finally:
            await installer.close()
            await install.close()
        return [one.result() for one in across], after, run.version

    with served(folder, tmp_path) as server:
        across, after, version = asyncio.run(play(server))
        saved = run.save(folder, tmp_path / "new")
    assert any(len({span.version for span in one.spans}) == 2 for one in across)
    for result in [*results_of(across), *results_of(after)]:
        assert result.routed_experts is not None
        assert result.routed_experts.spans == ((0, len(result.token_ids) - 1),)
    model = LearnerModel(saved, ALONE, router_replay=True)
    for plays in (across, after):
        rows = rows_by(model, results_of(plays))
        (batch,) = micro_batches([list(enumerate(rows))], 0, 1 << 14, "packed")
        mine = (batch.versions == version.step).numpy()
        forced, own = (np.abs(compared(model, batch, replay=replay).log_ratios)[mine] for replay in (True, False))
        print(f"{kv}: {mine.sum()} tokens of the new version differ by {forced.mean():.4f}, without {own.mean():.4f}")
        assert forced.mean() < own.mean()


SAMPLING: dict[str, Any] = {"seed": 1, "temperature": 1.0, "stop_token_ids": ()}


@pytest.mark.prove
def test_an_engine_without_the_option_returns_no_experts(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", "moe", 0)

    async def play(server: Server) -> Trajectory:
        async with one_off_connections() as http:
            sampler = GenerateSampler(http, server.url, Labels())
            await sampler.check()
            assert sampler.routed_bytes == 0
            return await played(sampler, 1, (4, 4))

    with served(folder, tmp_path, "--seed", "0") as server:
        assert asyncio.run(play(server)).routed_experts is None
