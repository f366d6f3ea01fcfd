"""An FSDP2 training loop in which each rank publishes its own shards after every step.

    torchrun --nproc-per-node N fsdp2_loop.py BASE HUB TOKEN_FILE STEPS OUT

The arguments are those of plain_loop.py. Publishing gathers no weights; only writing OUT at the end does.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_node import Publisher

base, hub, token_file, steps, out = sys.argv[1:]
dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
device = (
    torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    if torch.cuda.is_available()
    else torch.device("cpu")
)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
torch.manual_seed(dist.get_rank())

with Publisher(hub, token_file=token_file, base=base) as publisher:
    handle = None
    for step in range(1, int(steps) + 1):
        tokens = torch.randint(model.config.vocab_size, (4, 16), device=device)
        optimiser.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if handle is not None:
            handle.wait_snapshot()
        optimiser.step()
        handle = publisher.publish(step, model.named_parameters())
    live = handle.wait_live(fraction=1.0, timeout_s=120)

whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    print(f"engines: {live}")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.load_state_dict(whole)
    plain.to(torch.bfloat16).save_pretrained(out)
dist.barrier()  # a rank that ends while others still communicate may abort
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # at an ordinary end, a thread of gloo that still lets go of its last work can abort the process
