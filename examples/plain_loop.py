"""A plain PyTorch training loop that publishes after every step.

    python plain_loop.py BASE HUB TOKEN_FILE STEPS OUT

BASE: the Hugging Face folder that the hub was started with (p2pcast seed --base BASE). HUB: the hub's HOST:PORT.
TOKEN_FILE: the join token. STEPS: number of training steps. OUT: the folder for the last weights.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from trainer_node import Publisher

base, hub, token_file, steps, out = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(
    base, dtype=torch.float32
)  # master weights; versions have the base's dtype
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)

with Publisher(hub, token_file=token_file, base=base) as publisher:
    handle = None
    for step in range(1, int(steps) + 1):
        tokens = torch.randint(model.config.vocab_size, (4, 16))
        optimiser.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if handle is not None:
            handle.wait_snapshot()  # then the optimiser may change the weights
        optimiser.step()
        handle = publisher.publish(step, model.named_parameters())
    print(f"version {handle.wait_durable()} is at the hub, engines: {handle.wait_live(fraction=1.0, timeout_s=120)}")

model.to(torch.bfloat16).save_pretrained(out)
