"""Run as a script: ``fresh_logprobs.py FOLDER…``. Reads lists of token ids from stdin. Loads each folder in a fresh
vLLM engine of its own. Prints, for each folder and each list, the log-probability of every token but the first given
the tokens before it. Folders that are equal say how far engines of equal weights differ: the engines at odd places read
one list at a time, the others all at once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams


def main() -> None:
    asked, out = json.load(sys.stdin), []
    for number, folder in enumerate(sys.argv[1:]):
        sizes: Any = {"max_model_len": 256, "max_num_seqs": 8, "logprobs_mode": "processed_logprobs"}
        engine = LLM(folder, enforce_eager=True, enable_prefix_caching=False, **sizes)
        how = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": ids} for ids in asked]
        turns = [[one] for one in prompts] if number % 2 else [prompts]
        done = [answer for turn in turns for answer in engine.generate(turn, how, use_tqdm=False)]
        out.append(
            [
                [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
                for answer, ids in zip(done, asked, strict=True)
            ]
        )
        engine.llm_engine.engine_core.shutdown()
        del engine
    print("\n" + json.dumps(out))


if __name__ == "__main__":
    main()
