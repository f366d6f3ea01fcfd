"""TRL's asynchronous GRPO with p2pcast instead of NCCL, and a rollout worker that samples with the weights of a peer.

    python trl_async_grpo.py BASE HUB TOKEN_FILE STEPS OUT PEER
    torchrun --nproc-per-node N trl_async_grpo.py BASE HUB TOKEN_FILE STEPS OUT PEER

The first arguments are those of plain_loop.py. PEER: the state folder of a peer on this machine. The task is to add two
numbers. TRL's own rollout worker, with a vLLM server for each peer, needs no more than the argument weight_transfer.
"""

import os
import queue
import random
import sys
import threading

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from p2pcast import Reader
from trainer_node.frameworks.trl import P2PCast

base, hub, token_file, steps, out, peer = sys.argv[1:]
ranks = int(os.environ.get("WORLD_SIZE", "1"))
GENERATIONS = 4
TOKENS = 3


class Sampler:
    """A rollout worker by TRL's protocol, as a thread beside the trainer."""

    def __init__(self):
        self.rollout_buffer = queue.Queue(maxsize=4 * GENERATIONS)
        self.metrics_queue = queue.Queue()
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.model_version = self.group = 0
        self.ending = threading.Event()
        self.error = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self):
        self.thread.start()

    def stop(self):
        self.ending.set()
        if self.thread.is_alive():  # not if the trainer ends before it has started the worker
            self.thread.join(60)

    def update_model_version(self, model_version):
        self.model_version = model_version  # every engine serves it: P2PCast has waited for them

    def check_health(self, stale_after_s):
        if self.error is not None:
            raise RuntimeError("the sampler has failed") from self.error

    def run(self):
        try:
            loaded = None
            while not self.ending.is_set():
                model_version = self.model_version
                if model_version != loaded:
                    with Reader(peer) as version, torch.no_grad():
                        parameters = dict(self.model.named_parameters())
                        for name, tensor in version.tensors():
                            parameters[name].copy_(tensor)
                    loaded = model_version
                for sample in self.sampled(model_version):
                    self.put(sample)
        except Exception as error:  # noqa: BLE001 - TRL's check_health raises it
            self.error = error

    def put(self, sample):
        while not self.ending.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=1)
                break
            except queue.Full:
                pass

    @torch.no_grad()
    def sampled(self, model_version):
        a, b = random.randint(10, 49), random.randint(10, 49)
        text, truth = f"{a}+{b}=", f"{a + b}"
        prompt = torch.tensor([self.tokenizer.encode(text)] * GENERATIONS)
        tokens = prompt
        log_probs = []
        for _ in range(TOKENS):
            logits = self.model(input_ids=tokens).logits[:, -1].log_softmax(-1)
            drawn = logits.exp().multinomial(1)
            log_probs.append(logits.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], dim=1)
        answers = tokens[:, prompt.shape[1] :]
        wanted = torch.tensor([*self.tokenizer.encode(truth), self.tokenizer.eos_token_id])
        rewards = (answers == wanted).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        self.group += 1
        for ids, chances, reward, advantage in zip(tokens, torch.cat(log_probs, 1), rewards, advantages, strict=True):
            yield RolloutSample(
                prompt=[{"role": "user", "content": text}],
                completion=[{"role": "assistant", "content": self.tokenizer.decode(ids[prompt.shape[1] :])}],
                input_ids=ids.numpy(),
                completion_mask=np.array([0] * prompt.shape[1] + [1] * TOKENS),
                old_log_probs=np.concatenate([np.zeros(prompt.shape[1], np.float32), chances.numpy()]),
                advantage=float(advantage),
                model_version=model_version,
                group_id=self.group,
                metrics={"reward": float(reward)},
            )


trainer = AsyncGRPOTrainer(
    model=base,
    args=AsyncGRPOConfig(
        out,
        max_steps=int(steps),
        learning_rate=1e-4,
        per_device_train_batch_size=4 * GENERATIONS,
        num_generations=GENERATIONS,
        max_staleness=4,
        token_budget=0,  # samples a micro-batch: per_device_train_batch_size
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        fsdp=ranks > 1,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]} if ranks > 1 else None,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"prompt": ["17+25="]}),  # the sampler makes its own prompts
    rollout_worker=Sampler(),
    weight_transfer=P2PCast(hub, token_file=token_file, base=base, live_fraction=1.0, live_timeout_s=120),
)
trainer.train()
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
