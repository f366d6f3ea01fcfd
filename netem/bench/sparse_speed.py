"""Decoding speed of one vLLM engine with sparse and with dense attention, by length of the text, in the same process.

Prompts stay in the prefix cache, so that only decoding is timed; rounds of both kinds take turns. Before that, the
engine's tokens are compared: with a budget that covers the text those of dense attention, otherwise the learner's. Run
as a script: the process of the engine.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from p2pcast.sparse.budget_schedule import PAGE_TOKENS, BudgetSchedule
from rollout_node.sparse_calibration.engine_process import answer, run_engine

VOCABULARY: Final = 500
MOST_COMPARED: Final = 2048
"""Tokens of the prompts at which tokens are compared, at most: the learner's passes take quadratic time and memory."""
RESERVE: Final = 64
"""Tokens of the engine's length beyond the longest text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedOptions:
    """``model``: a folder; None: a model of random weights with ``layers`` layers. ``lengths``: of the prompts, in
    tokens. ``samples``: texts in one batch. ``tokens``: decoded in each round.
    """

    model: Path | None
    layers: int
    lengths: Sequence[int]
    samples: int
    tokens: int
    rounds: int
    schedule: BudgetSchedule
    block_size: int


def bench_sparse(options: SpeedOptions) -> dict[str, Any]:
    """``rows`` by length: ``dense`` and ``sparse`` in tokens a second, the medians over rounds, and their ``ratio``.
    ``agreement`` is that of ``sparse_agreement``, at the least length or at MOST_COMPARED, whichever is less. ``exact``
    tells whether a budget that covers the text gives the tokens and log-probabilities of dense attention. Raises
    LocalError when the engine fails.
    """
    # Imported here: the engine's process imports this module, and must not load numba.
    from netem.bench.sparse_agreement import ScoredAnswer, agreement

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder:
        model = options.model or _random_model(Path(folder) / "model", options)
        asked = asdict(options) | {"model": str(model), "schedule": options.schedule.document()}
        found = run_engine("netem.bench.sparse_speed", asked)
        said = {kind: [ScoredAnswer(*one) for one in answers] for kind, answers in found["said"].items()}
        agreed = agreement(
            Path(asked["model"]), found["prompts"], said["dense"], said["sparse"], options.schedule, options.block_size
        )
    agreed["exact"] = said["full"] == said["dense"]
    return {"schedule": options.schedule.document(), "agreement": agreed, "rows": found["rows"]}


def _random_model(folder: Path, options: SpeedOptions) -> Path:
    from netem.fleet.small_model import SmallModel, write_small_model

    longest = max(options.lengths) + options.tokens + RESERVE
    form = SmallModel(VOCABULARY, hidden=256, layers=options.layers, head=64, positions=longest)
    return write_small_model(folder, form, seed=1, dtype="bfloat16")


def _child(asked: dict[str, Any]) -> dict[str, Any]:
    """In the process of the engine."""
    from vllm import LLM, SamplingParams

    from rollout_node.vllm_plugin.sparse_attention import budget_in_use

    longest = max(asked["lengths"]) + asked["tokens"] + RESERVE
    engine = LLM(
        asked["model"],
        enforce_eager=True,
        block_size=asked["block_size"],
        max_model_len=longest,
        max_num_seqs=asked["samples"],
    )
    schedules = {"dense": None, "sparse": BudgetSchedule.read(asked["schedule"])}
    rng = random.Random(1)

    def texts(length: int) -> list[Any]:
        return [
            {"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(length)]} for _ in range(asked["samples"])
        ]

    compared = texts(min(*asked["lengths"], MOST_COMPARED))
    how = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, logprobs=0)

    def said(schedule: BudgetSchedule | None) -> list[Any]:
        budget_in_use.use(schedule)
        engine.reset_prefix_cache()
        answers = [one.outputs[0] for one in engine.generate(compared, how, use_tqdm=False)]
        return [[list(one.token_ids), [next(iter(row.values())).logprob for row in one.logprobs]] for one in answers]

    answers = {name: said(schedule) for name, schedule in schedules.items()}
    answers["full"] = said(BudgetSchedule((longest // PAGE_TOKENS,)))
    rows = []
    for length in asked["lengths"]:
        prompts: Any = texts(length)

        def decode(tokens: int, prompts: Any = prompts) -> float:
            began = time.perf_counter()
            engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
            return time.perf_counter() - began

        budget_in_use.use(None)
        decode(1)
        took: dict[str, list[float]] = {name: [] for name in schedules}
        for _ in range(asked["rounds"]):
            for name, schedule in schedules.items():
                budget_in_use.use(schedule)
                took[name].append(decode(asked["tokens"] + 1) - decode(1))
        speeds = {name: asked["samples"] * asked["tokens"] / statistics.median(found) for name, found in took.items()}
        rows.append({"length": length} | speeds | {"ratio": speeds["sparse"] / speeds["dense"]})
    return {"rows": rows, "said": answers, "prompts": [one["prompt_token_ids"] for one in compared]}


if __name__ == "__main__":
    answer(_child)
