"""``p2pcast task try``: play a few jobs of a task with a local engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from p2pcast.cli.options import documented, task_names, written
from p2pcast.ground.addresses import http_url
from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.process import event_loop

if TYPE_CHECKING:
    from p2pcast.rollouts.job import Job
    from p2pcast.tasks.child_processes.play_pool import PlayPool
    from p2pcast.tasks.task import Sampler, Task
    from p2pcast.tasks.task_process import TaskProcesses

MAX_BODY = 1 << 20
TIMEOUT_S = 30.0


@click.group()
def task() -> None:
    """Tasks, which workers play."""


@task.command("try")
@click.argument("name", shell_complete=task_names)
@click.option(
    "--engine",
    required=True,
    metavar="URL",
    help="Base URL of a vLLM server, started with --enable-scale-out, or of a SGLang server.",
)
@click.option(
    "--sampler",
    type=click.Choice(["generate", "sglang"]),
    default="generate",
    help="Route of the engine. generate: vLLM's /inference/v1/generate; sglang: SGLang's /generate.",
)
@click.option("--jobs", type=click.IntRange(1, 10_000), default=3, help="Number of jobs to play.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the prompts and of the samples.")
@click.option("--held-out", is_flag=True, help="Held-out problems, as evaluations play them, instead of the others.")
@click.option("--temperature", type=click.FloatRange(0.0, 100.0), default=1.0, help="Temperature of sampling.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most sampled tokens of a play.  [default: the task's]")
@documented
def try_task(
    name: str,
    engine: str,
    sampler: Literal["generate", "sglang"],
    jobs: int,
    seed: int,
    held_out: bool,
    temperature: float,
    max_tokens: int | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Play a few jobs of the task NAME, and print prompts, tokens with their mask, and rewards.

    NAME is sums, recite, leduc, holdem, math, verifiers, a plug-in's name, or PKG.MODULE:CLASS, each with settings:
    NAME,KEY=VALUE. A task in text takes the tokenizer of the engine's model, unless NAME sets another. Nothing is
    handed in; no ledger and no peer are needed.

    \b
    Examples:
      p2pcast task try sums --engine http://127.0.0.1:8000
      p2pcast task try math,questions=problems.jsonl --engine http://127.0.0.1:8000
      p2pcast task try sums,held_out=10 --held-out --jobs 500 --temperature 0 --engine http://127.0.0.1:8000
    """
    from p2pcast.tasks.child_processes.prompt_reader import first_prompts
    from p2pcast.tasks.task_loader import load_task, missing_settings

    engine = http_url(engine, "--engine")
    if "tokenizer" in missing_settings(name, Path.cwd()):
        name += f",tokenizer={event_loop.run(model_of(engine))}"
    found = load_task(name, Path.cwd())
    prompts = first_prompts(name, found, seed, jobs, held_out=held_out)
    chosen = [_job(found, prompt.prompt, number, seed, temperature, max_tokens or prompt.max_tokens)
              for number, prompt in enumerate(prompts)]  # fmt: skip
    plays = event_loop.run(_played(found, name, chosen, engine, sampler))
    mean = sum(play["reward"] for play in plays) / len(plays) if plays else None
    document = {"task": found.name, "hash": found.hash.hex(), "mean_reward": mean, "plays": plays}
    if not written(document, output, as_json=as_json):
        for number, play in enumerate(plays):
            _show(number, play, found)
        if mean is not None:
            click.echo(f"{len(plays)} plays, mean reward {mean:.4g}")


def _job(task: Task, prompt: bytes, number: int, seed: int, temperature: float, max_tokens: int) -> Job:
    from p2pcast.ground.version import Version
    from p2pcast.rollouts.job import Group, job_of

    ident = number.to_bytes(16, "big")
    group = Group(
        id=ident,
        size=1,
        purpose="train",
        task=task.name,
        task_hash=task.hash,
        prompt=prompt,
        seed=(seed + number) % (1 << 64),
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=tuple(task.stop_token_ids),
    )
    return job_of(group, 0, ident, Version(0, 0))


async def model_of(engine: str) -> str:
    """Return the folder of the model that the engine serves, or its name on Hugging Face."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{engine}/v1/models", timeout=timeout) as response:
            body = await response.content.read(MAX_BODY)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise RetryableError(f"the engine at {engine} does not answer: {error or type(error).__name__}") from None
    try:
        model = json.loads(body)["data"][0]
        root = model.get("root") or model["id"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        root = None
    if type(root) is not str or "," in root:
        raise LocalError(f"the engine at {engine} names no model: write the model's folder as tokenizer=DIR")
    return root


async def _played(
    task: Task, name: str, jobs: list[Job], engine: str, sampler: Literal["generate", "sglang"]
) -> list[dict[str, Any]]:
    import aiohttp

    from p2pcast.tasks.child_processes.play_pool import PlayPool
    from p2pcast.tasks.task_process import TaskProcesses
    from rollout_node.worker.engine_versions import UnnamedWeights
    from rollout_node.worker.generate_sampler import GenerateSampler
    from rollout_node.worker.sglang_sampler import SglangSampler

    pool, checks = PlayPool(name, task.hash), TaskProcesses(name, task.hash)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        engine_sampler = {"generate": GenerateSampler, "sglang": SglangSampler}[sampler](http, engine, UnnamedWeights())
        await engine_sampler.check()
        try:
            return [await _play(pool, job, engine_sampler, checks) for job in jobs]
        finally:
            await pool.close()
            await checks.close()


async def _play(pool: PlayPool, job: Job, sampler: Sampler, checks: TaskProcesses) -> dict[str, Any]:
    played = (await pool.play(sampler, job)).trajectory
    return {
        "prompt": job.prompt.decode(errors="replace"),
        "token_ids": played.token_ids.tolist(),
        "mask": played.mask.tolist(),
        "logprobs": [round(float(value), 4) for value in played.logprobs],
        "stop": played.stop,
        "tags": dict(played.tags),
        "reward": await checks.reward(job, played.token_ids, played.mask),
    }


def _show(number: int, play: dict[str, Any], task: Task) -> None:
    click.echo(f"job {number}: {play['prompt']}")
    for sampled, token_ids in _parts(play["token_ids"], play["mask"]):
        click.echo(f"  {'policy' if sampled else 'task':6}  {task.text(token_ids)}   {json.dumps(token_ids)}")
    tags = "".join(f", {key} {value}" for key, value in play["tags"].items())
    click.echo(f"  reward {play['reward']:g}, stop {play['stop']}{tags}")


def _parts(token_ids: list[int], mask: list[int]) -> list[tuple[int, list[int]]]:
    """Split the tokens into runs with the same mask value."""
    out: list[tuple[int, list[int]]] = []
    for token, value in zip(token_ids, mask, strict=True):
        if not out or out[-1][0] != value:
            out.append((value, []))
        out[-1][1].append(token)
    return out
