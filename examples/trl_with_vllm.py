"""TRL's asynchronous GRPO whose vLLM server gets its weights from the peer beside it.

    HUB=… TOKEN_FILE=… MODEL=BASE PORT=8000 examples/vllm_server.sh
    python trl_with_vllm.py BASE HUB TOKEN_FILE STEPS OUT http://127.0.0.1:8000

The first arguments are those of plain_loop.py. The tokenizer of BASE needs a chat template. The reward is the share of
digits in an answer.
"""

import sys

import torch
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from trainer_node.frameworks.trl import P2PCast

base, hub, token_file, steps, out, server = sys.argv[1:]


def digits(completions, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts]


if __name__ == "__main__":  # TRL's rollout worker is a process that imports this module
    trainer = AsyncGRPOTrainer(
        model=base,
        args=AsyncGRPOConfig(
            out,
            max_steps=int(steps),
            learning_rate=1e-4,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=8,
            token_budget=0,
            vllm_server_base_url=server,
            bf16=torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        reward_funcs=digits,
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": f"{n}+{n}="}] for n in range(10, 50)]}
        ),
        weight_transfer=P2PCast(hub, token_file=token_file, base=base),
    )
    trainer.train()
    trainer.model.to(torch.bfloat16).save_pretrained(out)
