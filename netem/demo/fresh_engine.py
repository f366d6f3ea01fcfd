"""``python -m netem.demo.fresh_engine ORDER FOLDER…``: loads each checkpoint into a new vLLM engine and prints its
greedy answers, a JSON list, on the last line.

ORDER is ``{"prompts": […], "tokens": n, "options": {…}}``, with further options of the engine. One engine and one
prompt at a time, so batches have the size of the probes'.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    order = json.loads(sys.argv[1])
    how = SamplingParams(temperature=0, max_tokens=order["tokens"], ignore_eos=True, logprobs=1)
    found = []
    for folder in sys.argv[2:]:
        engine = LLM(
            folder,
            max_model_len=64,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            **{"enforce_eager": True} | order["options"],
        )
        answers = []
        for prompt in order["prompts"]:
            output = engine.generate([prompt], how, use_tqdm=False)[0].outputs[0]
            tokens = list(output.token_ids)
            answers.append(
                {"tokens": tokens, "logprobs": [at[t].logprob for at, t in zip(output.logprobs, tokens, strict=True)]}
            )
        found.append(answers)
        engine.llm_engine.engine_core.shutdown()
        del engine
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
