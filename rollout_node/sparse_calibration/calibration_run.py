"""Run as a script: vLLM samples rollouts with each budget, and dense attention gives their acceptance rates.

Each rollout is sampled with a constant budget, and its tokens are scored again as a prompt, which is dense. Both sides
give their most probable tokens. Tokens missing on one side count as 0 (Sparrow, section 3.1), so rates are never too
high.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pcast.ground.errors import LocalError
from p2pcast.sparse.acceptance_rate import acceptance_bounds
from rollout_node.sparse_calibration.engine_process import answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOrder:
    """``prompts``: token ids. ``budgets``: schedules by number of pages. ``tokens``: limit on each answer.
    ``candidates``: number of most probable tokens compared at each position.
    """

    model: str
    prompts: Sequence[Sequence[int]]
    budgets: Mapping[int, Mapping[str, Any]]
    tokens: int
    candidates: int
    block_size: int
    longest: int
    at_once: int


def rollouts(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the calibration rollouts described by ``asked``, a CalibrationOrder document. Returns one ``{"pages",
    "positions", "alphas"}`` per rollout. Raises LocalError if the engine has no sparse attention, because every budget
    would then look good.
    """
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from p2pcast.sparse.budget_schedule import BudgetSchedule
    from rollout_node.vllm_plugin import sparse_attention
    from rollout_node.vllm_plugin.sparse_attention import budget_in_use

    count = asked["candidates"]
    engine = LLM(
        asked["model"],
        block_size=asked["block_size"],
        max_model_len=asked["longest"],
        max_num_seqs=asked["at_once"],
        max_logprobs=count,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        # Compiling for a CPU takes longer than it saves.
        enforce_eager=current_platform.is_cpu(),
    )
    if not all(engine.apply_model(sparse_attention.has_layers)):
        raise LocalError(
            f"no layer of {asked['model']} would be sparse: vLLM has taken another attention backend than"
            " FlashAttention, or layers 2 and later have sliding windows"
        )
    # vLLM scores prompts at temperature 1. The text of each candidate would take longer than its score.
    sampling: Any = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "detokenize": False}
    found = []
    for pages, document in asked["budgets"].items():
        budget_in_use.use(BudgetSchedule.read(document))
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        how = SamplingParams(**sampling, max_tokens=asked["tokens"], logprobs=count)
        answers = [one.outputs[0] for one in engine.generate(prompts, how, use_tqdm=False)]
        whole: Any = [
            {"prompt_token_ids": [*prompt, *answer.token_ids]}
            for prompt, answer in zip(asked["prompts"], answers, strict=True)
        ]
        budget_in_use.use(None)
        # One more token, because vLLM samples at least one.
        score = SamplingParams(**sampling, max_tokens=1, prompt_logprobs=count)
        scored = engine.generate(whole, score, use_tqdm=False)
        for prompt, sampled, judged in zip(asked["prompts"], answers, scored, strict=True):
            dense = judged.prompt_logprobs[len(prompt) :]
            # The first token came from the prompt's own pass, which is dense.
            pairs = list(zip(dense, sampled.logprobs, strict=True))[1:]
            alphas = [acceptance_bounds(_values(p), _values(q)).least for p, q in pairs]
            positions = list(range(len(prompt) + 1, len(prompt) + 1 + len(alphas)))
            found.append({"pages": int(pages), "positions": positions, "alphas": alphas})
    return found


def _values(entries: Mapping[int, Any]) -> dict[int, float]:
    return {token: entry.logprob for token, entry in entries.items()}


if __name__ == "__main__":
    answer(rollouts)
