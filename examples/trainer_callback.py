"""A Trainer of transformers that publishes its weights while it trains, on one process or with FSDP2 on several.

    python trainer_callback.py BASE HUB TOKEN_FILE STEPS OUT
    torchrun --nproc-per-node N trainer_callback.py BASE HUB TOKEN_FILE STEPS OUT

The arguments are those of plain_loop.py. Run again with an OUT that holds checkpoints, it continues from the newest.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trainer_node.frameworks.transformers_callback import PublishCallback

base, hub, token_file, steps, out = sys.argv[1:]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
texts = torch.randint(model.config.vocab_size, (256, 16), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        out,
        max_steps=int(steps),
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        save_steps=2,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        fsdp=ranks > 1,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]} if ranks > 1 else None,
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    callbacks=[PublishCallback(hub, token_file=token_file, base=base, every_steps=3, live_fraction=1.0)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if os.path.isdir(out) else None)
whole = trainer.accelerator.get_state_dict(trainer.model)
if trainer.is_world_process_zero():
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain.load_state_dict(whole)
    plain.to(torch.bfloat16).save_pretrained(out)
if ranks > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # at an ordinary end, a thread of gloo that still lets go of its last work can abort the process
