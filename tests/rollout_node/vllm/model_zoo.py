"""Run as a script: ``model_zoo.py FOLDER KIND…``, or ``KIND:DTYPE``, saves small models of random weights as
``FOLDER/KIND``.

Each kind exercises one behaviour of weight loaders. Weights have a wide distribution, so that greedy choices don't
depend on rounding. Values that are one or zero in a fresh model (norms, biases) are random too, so that a misplaced
value is visible.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from p2pcast.checkpoint.folder import write_folder
from p2pcast.quantised.folder_opening import opening

_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_NO_HEAD_DIM = {key: value for key, value in _SMALL.items() if key != "head_dim"}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
_FALCON = {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # each expert's gate, up and down are slices of two parameters
    "moe": ("qwen3_moe", {**_SMALL, **_EXPERTS}),
    # fewer key and value heads than ranks: each rank holds them all
    "moe_one_kv_head": ("qwen3_moe", {**_SMALL, **_EXPERTS, "num_key_value_heads": 1}),
    # experts beside one expert for all tokens
    "shared_expert": ("qwen2_moe", {**_NO_HEAD_DIM, **_EXPERTS, "shared_expert_intermediate_size": 96}),
    # attention computes from matrices derived after loading
    "mla": ("deepseek_v2", {**_SMALL, **_MLA}),
    # q, k and v in one parameter, gate and up in another; keys and values have fewer heads than queries
    "qwen3": ("qwen3", _SMALL),
    # one parameter for two layers
    "tied": ("qwen3", {**_SMALL, "tie_word_embeddings": True}),
    # biases of q, k and v
    "qwen2": ("qwen2", _NO_HEAD_DIM),
    # checkpoints hold the transposes of the weights
    "gpt2": ("gpt2", {**_NO_HEAD_DIM, **_GPT2, "tie_word_embeddings": True}),
    # the loader splits q, k and v, which are interleaved by head, and joins them in another order
    "falcon": ("falcon", {**_NO_HEAD_DIM, **_FALCON}),
    # int8 weights with one scale per row
    "int8": ("qwen3", _SMALL),
    # the same weights beside activations with zero points, for which the engine packs the weights
    "int8_packed": ("qwen3", _SMALL),
    # fp8 weights with one scale per row, which the engine transposes
    "fp8": ("qwen2", _NO_HEAD_DIM),
}
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def _to_int8(folder: Path, *, symmetric: bool) -> None:
    """Quantise the linears of a saved model, as compressed-tensors stores them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[name + "_scale"] = scale
        tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = copy.deepcopy(_INT8)
    how["config_groups"]["group_0"]["input_activations"]["symmetric"] = symmetric
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


def _to_fp8(folder: Path) -> None:
    """Quantise a saved model as a hub does."""
    plain = folder.rename(folder.with_name(f"{folder.name}-plain"))
    source = opening("fp8-channel")(plain)
    write_folder(folder, source.layout(), source.words, source.small_files())
    shutil.rmtree(plain)


def _model(folder: Path, kind: str, dtype: torch.dtype) -> None:
    family, options = KINDS[kind]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((1 if parameter.ndim == 1 else 0) + 0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    if kind.startswith("int8"):
        _to_int8(folder, symmetric=kind == "int8")
    if kind == "fp8":
        _to_fp8(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        kind, _, dtype = name.partition(":")
        _model(Path(sys.argv[1]) / kind, kind, getattr(torch, dtype or "bfloat16"))
