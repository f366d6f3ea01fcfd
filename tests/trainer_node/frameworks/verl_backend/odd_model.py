"""A small Qwen3 with odd shapes and tied embeddings, and a tokenizer of numbers: a folder that verl trains from."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 1021
"""A prime: rows that no number of ranks divides evenly."""


def write_odd_model(
    folder: Path, *, hidden: int = 72, layers: int = 1, vocabulary: int = VOCABULARY, head: int = 26
) -> int:
    """Returns the bytes of its weights. ``head``: dimensions of a head."""
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden + 27,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=head,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", "\n"])}
    words |= {str(number): number + 5 for number in range(VOCABULARY - 5)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return sum(tensor.nbytes for tensor in model.parameters())


def write_prompts(file: Path, number: int) -> None:
    """Prompts of two numbers, in the form that verl reads."""
    drawn = random.Random(0)
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"{drawn.randrange(9)} {drawn.randrange(9)}"}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
        }
        for index in range(number)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
