"""TRL trains on batches of a ledger: ``ledger_training.py MODEL HUB TOKEN LEDGER BEARER OUT STEPS SAVE_EVERY STAYS``.

Continues from the newest checkpoint in OUT. Each step appends a line to OUT/trained.jsonl: the optimiser step, and the
samplers' log-probabilities of the tokens that the loss has seen. At step STAYS the program waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from trainer_node.frameworks.trl import LedgerRollouts, P2PCast

model, hub, token, ledger, bearer, out, steps, save_every, stays = sys.argv[1:]
SAMPLES = 8
OUT = Path(out)
OUT.mkdir(exist_ok=True)


class Noted(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        with (OUT / "trained.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.global_step, **SEEN.pop(0)}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if state.global_step == int(stays):
            threading.Event().wait()


class Seeing(AsyncGRPOTrainer):
    """Notes what the loss is taken over."""

    def compute_loss(self, model, inputs, *arguments, **named):
        SEEN.append(
            {
                "logprobs": np.round(inputs["old_log_probs"].double().flatten().numpy(), 5).tolist(),
            }
        )
        return super().compute_loss(model, inputs, *arguments, **named)


SEEN: list[dict] = []
transfer = P2PCast(hub, token_file=token, base=model, first_step=0, live_fraction=None)
rollouts = LedgerRollouts(ledger, transfer, bearer_file=bearer, samples_a_step=SAMPLES)
trainer = Seeing(
    model=model,
    args=AsyncGRPOConfig(
        out,
        max_steps=int(steps),
        per_device_train_batch_size=SAMPLES,
        learning_rate=1e-3,
        max_staleness=4,
        token_budget=0,
        bf16=False,
        use_cpu=True,
        save_steps=int(save_every),
        report_to="none",
        disable_tqdm=True,
    ),
    processing_class=AutoTokenizer.from_pretrained(model, pad_token="w0", eos_token="w2"),
    train_dataset=Dataset.from_dict({"prompt": ["a"]}),
    rollout_worker=rollouts,
    weight_transfer=transfer,
    callbacks=[rollouts.callback(), Noted()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
