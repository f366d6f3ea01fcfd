"""Runs a program that uses TRL's AsyncGRPOTrainer on a machine without a GPU: ``python trl_on_cpu.py PROGRAM …``.

TRL's attention is a kernel for GPUs, and TRL asks CUDA for the GPU's name. Both are replaced here; all else is TRL's.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


def attention(query, key, value, ends_q, ends_k, longest_q, longest_k, *, softmax_scale, causal, window_size):
    """``flash_attn_varlen_func`` for the arguments that TRL gives. Tensors [tokens, heads, width]; the segments lie end
    to end, and the last query of a segment sees all its keys.
    """
    assert causal
    assert window_size == (-1, -1)
    found = []
    for segment in range(len(ends_q) - 1):
        q, k, v = (
            whole[ends[segment] : ends[segment + 1]].transpose(0, 1)
            for whole, ends in ((query, ends_q), (key, ends_k), (value, ends_k))
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found.append(
            scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(found)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None

if __name__ == "__main__":
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
