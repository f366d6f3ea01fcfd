"""Run as a script: load each folder named on the command line in a fresh engine; print the greedy completions as JSON.

Standard input: JSON, prompts, tokens, tensor parallel size. One engine and one prompt at a time, so that batches are
equal.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams


def main() -> None:
    prompts, tokens, ranks = json.load(sys.stdin)
    found = []
    for folder in sys.argv[1:]:
        sizes: Any = {"max_model_len": 256, "max_num_seqs": 8, "tensor_parallel_size": ranks}
        engine = LLM(folder, enforce_eager=True, enable_prefix_caching=False, **sizes)
        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        found.append([engine.generate([p], how, use_tqdm=False)[0].outputs[0].text for p in prompts])
        engine.llm_engine.engine_core.shutdown()
        del engine
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
