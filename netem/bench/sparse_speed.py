"""Decoding speed of one vLLM engine with sparse and with dense attention, by length of the text, in the same process.

Prompts stay in the prefix cache, so that only decoding is timed; rounds of both kinds take turns. Run as a script: the
process of the engine.
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

from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.sparse_calibration.engine_process import answer, run_engine

VOCABULARY: Final = 500
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
    """Rows by length: ``dense`` and ``sparse`` in tokens a second, the medians over rounds, and their ``ratio``. Raises
    LocalError when the engine fails.
    """
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder:
        model = options.model or _random_model(Path(folder) / "model", options)
        asked = asdict(options) | {"model": str(model), "schedule": options.schedule.document()}
        rows = run_engine("netem.bench.sparse_speed", asked)
    return {"schedule": options.schedule.document(), "rows": rows}


def _random_model(folder: Path, options: SpeedOptions) -> Path:
    from netem.rollouts.small_model import SmallModel, write_small_model

    longest = max(options.lengths) + options.tokens + RESERVE
    form = SmallModel(VOCABULARY, hidden=256, layers=options.layers, head=64, positions=longest)
    return write_small_model(folder, form, seed=1, dtype="bfloat16")


def _child(asked: dict[str, Any]) -> list[dict[str, Any]]:
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
    rows = []
    for length in asked["lengths"]:
        prompts: Any = [
            {"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(length)]} for _ in range(asked["samples"])
        ]

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
    return rows


if __name__ == "__main__":
    answer(_child)
