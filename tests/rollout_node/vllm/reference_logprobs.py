"""Run as a script: ``reference_logprobs.py FOLDER…``. Reads ``[[token ids, temperature], …]`` from stdin, and prints
for each folder and each sequence the log-probability of every token but the first, given the tokens before.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    asked, out = json.load(sys.stdin), []
    for folder in sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        rows = []
        for token_ids, temperature in asked:
            ids = torch.tensor([token_ids])
            with torch.inference_mode():
                logits = model(ids).logits[0, :-1].float() / temperature
            rows.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist())
        out.append(rows)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
