"""Run as a script: greedy tokens and their log-probabilities of one vLLM engine, as JSON.

Standard input: JSON. ``model``. ``sparse``: the plugin's backend, or vLLM's own. ``options`` of the engine. ``rounds``:
each with a ``schedule`` (values of its bins, or None) and ``requests`` (prompt, tokens). ``adapter``: folder of a LoRA
adapter that answers, or None.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    asked = json.load(sys.stdin)
    os.environ["P2PCAST_SPARSE_ATTENTION"] = "1" if asked["sparse"] else "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from p2pcast.sparse.budget_schedule import BudgetSchedule
    from rollout_node.vllm_plugin.sparse_attention import budget_in_use

    engine = LLM(
        asked["model"],
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=False,
        **asked["options"],
    )
    adapter = LoRARequest("phi", 1, asked["adapter"]) if asked.get("adapter") else None
    found = []
    for one in asked["rounds"]:
        budget_in_use.use(None if one["schedule"] is None else BudgetSchedule(tuple(one["schedule"])))
        engine.reset_prefix_cache()
        prompts: Any = [{"prompt_token_ids": prompt} for prompt, _ in one["requests"]]
        how = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
            for _, tokens in one["requests"]
        ]
        answers = [answer.outputs[0] for answer in engine.generate(prompts, how, lora_request=adapter, use_tqdm=False)]
        found.append([[list(a.token_ids), [next(iter(p.values())).logprob for p in a.logprobs]] for a in answers])
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    print("\n" + json.dumps({"rounds": found, "metrics": metrics}))


if __name__ == "__main__":
    main()
