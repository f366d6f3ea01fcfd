"""Run as a script: ``sums_model.py FOLDER DIGITS``. A small Qwen3 that has learnt a part of task ``sums``: samples of
one prompt get unlike rewards, which a group needs in order to be trained.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from p2pcast.tasks.sums import BEGIN, END, VOCABULARY, encode

SOLVED = 0.4
"""Probability of the right answer, averaged over problems, at which training ends."""
MOST_STEPS, BATCH = 3000, 64


def main(folder: Path, digits: int) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.08, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    drawn = random.Random(1)
    for step in range(MOST_STEPS):
        rows = [_solved(drawn.randrange(10**digits), drawn.randrange(10**digits)) for _ in range(BATCH)]
        width = max(len(asked) + len(answer) for asked, answer in rows)
        ids = torch.zeros(BATCH, width, dtype=torch.long)
        learnt = torch.zeros(BATCH, width, dtype=torch.bool)
        for number, (asked, answer) in enumerate(rows):
            end = len(asked) + len(answer)
            ids[number, :end] = torch.tensor([*asked, *answer])
            learnt[number, len(asked) : end] = True
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        said = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * learnt[:, 1:]
        if said.sum(1).exp().mean() > SOLVED:
            break
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        optimiser.zero_grad(set_to_none=True)
        (-said.sum() / learnt.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    print(f"{step} steps: the right answer has probability {said.detach().sum(1).exp().mean():.2f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=_words(), unk_token="w0").save_pretrained(folder)


def _solved(left: int, right: int) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and of its answer."""
    return [BEGIN, *encode(f"{left}+{right}=")], [*encode(str(left + right)), END]


def _words() -> object:
    """A tokeniser that vLLM can load; requests hold token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
