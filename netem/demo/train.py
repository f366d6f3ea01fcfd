"""The demo's trainer, small but with real reinforcement learning: ``python -m netem.demo.train --out DIR``.

A Qwen3 language model learns to add two-digit numbers ("17+25=42"). First comes a short supervised warm-up at a high
learning rate, which ends in ``DIR/base``. Then follows policy gradient at an RL learning rate, on answers that the
model samples itself. Every few optimiser steps a new version of the weights is written to ``DIR/step_N``.

Promise: masters are fp32 under AdamW and published weights are bf16, so about 1 % of the values differ between
versions, as in RL post-training of large models. Folders are ordinary Hugging Face checkpoints that vLLM loads. Each
folder is renamed into place when it is complete, with ``STABLE`` written last. Stdout has one JSON document a line,
stderr has text for people. The same seed, sizes and number of threads give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from netem.fleet.small_model import SmallModel

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="
VOCABULARY = {token: number for number, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
VOCABULARY_ROWS = 64
"""Rows of the embedding: vLLM pads to multiples of 64, so no padding is needed."""
PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]
PROMPT_TOKENS = len("17+25=")
ANSWER_TOKENS = len("42") + 1
"""Two digits and the end-of-text token."""
MAX_POSITIONS = 64
HELD_OUT = 256
"""Problems excluded from training, for measuring accuracy."""
WAIT_POLL_S = 0.05

WARMUP_BATCH = 64
PROMPTS_PER_STEP = 24
SAMPLES_PER_PROMPT = 8
BETAS = (0.9, 0.95)
"""As in most LLM training. The short second memory lets Adam's scale follow from the warm-up to the RL phase."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Sums of two two-digit numbers with a two-digit result. ``prompts`` int64[n, 6], ``answers`` int64[n, 3]."""

    prompts: torch.Tensor
    answers: torch.Tensor

    @classmethod
    def shuffled(cls, generator: torch.Generator) -> Problems:
        """All 3240 problems."""
        pairs = [(a, b) for a in range(10, 90) for b in range(10, 100 - a)]
        pairs = [pairs[i] for i in torch.randperm(len(pairs), generator=generator).tolist()]
        prompts = [[VOCABULARY[c] for c in f"{a}+{b}="] for a, b in pairs]
        answers = [[VOCABULARY[c] for c in f"{a + b}"] + [EOS_ID] for a, b in pairs]
        return cls(torch.tensor(prompts), torch.tensor(answers))

    def __getitem__(self, index: slice | torch.Tensor) -> Problems:
        return Problems(self.prompts[index], self.answers[index])

    def draw(self, count: int, generator: torch.Generator) -> Problems:
        return self[torch.randint(len(self.prompts), (count,), generator=generator)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokeniser with one token a character, in the format of Hugging Face tools and vLLM."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # otherwise decoding would put a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(hidden: int, layers: int, *, tied: bool) -> Qwen3ForCausalLM:
    """A Qwen3 in fp32: heads of 64, half as many for keys and values, an MLP of three times the hidden size."""
    form = SmallModel(
        VOCABULARY_ROWS,
        hidden,
        layers,
        head=64,
        positions=MAX_POSITIONS,
        tied=tied,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    return form.made("bfloat16")


def answer_logits(model: Qwen3ForCausalLM, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Logits fp32[n, k, vocabulary] that predict the ``k`` answer tokens given all preceding tokens."""
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    logits: torch.Tensor = model(input_ids=tokens, logits_to_keep=answers.shape[1], use_cache=False).logits
    return logits


def supervised_loss(model: Qwen3ForCausalLM, batch: Problems) -> torch.Tensor:
    logits = answer_logits(model, batch.prompts, batch.answers)
    return F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())


def accuracy(model: Qwen3ForCausalLM, problems: Problems) -> float:
    """Share of problems solved by greedy decoding: every token is the likeliest after the right ones."""
    with torch.no_grad():
        guesses = answer_logits(model, problems.prompts, problems.answers).argmax(-1)
    return float((guesses == problems.answers).all(dim=1).float().mean())


def sample(model: Qwen3ForCausalLM, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Answers int64[n, 3] drawn at temperature 1, padded after the end of text. In production this is the rollout
    engines' work.
    """
    tokens, done = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(ANSWER_TOKENS):
        with torch.no_grad():
            chances = model(input_ids=tokens, logits_to_keep=1, use_cache=False).logits[:, -1].softmax(-1)
        drawn = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        drawn = torch.where(done, PAD_ID, drawn)
        done |= drawn == EOS_ID
        tokens = torch.cat([tokens, drawn[:, None]], dim=1)
    return tokens[:, PROMPT_TOKENS:]


def policy_loss(model: Qwen3ForCausalLM, batch: Problems, generator: torch.Generator) -> tuple[torch.Tensor, float]:
    """REINFORCE, fully on policy, with the mean of each prompt's own samples as baseline (the group advantage of GRPO).

    The reward is the share of the answer's tokens before the first mistake. Returns the loss and the mean reward.
    """
    prompts = batch.prompts.repeat_interleave(SAMPLES_PER_PROMPT, dim=0)
    truth = batch.answers.repeat_interleave(SAMPLES_PER_PROMPT, dim=0)
    sampled = sample(model, prompts, generator)
    reward = (sampled == truth).float().cumprod(dim=1).mean(dim=1)
    groups = reward.view(-1, SAMPLES_PER_PROMPT)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
    logits = answer_logits(model, prompts, sampled)
    surprise = F.cross_entropy(logits.transpose(1, 2), sampled, ignore_index=PAD_ID, reduction="none").sum(1)
    return (advantage * surprise).mean(), float(reward.mean())


def take_step(
    optimiser: torch.optim.Optimizer, model: Qwen3ForCausalLM, loss: torch.Tensor, learning_rate: float
) -> None:
    for group in optimiser.param_groups:
        group["lr"] = learning_rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def snapshot(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """The bf16 weights under their checkpoint names. A tied output layer equals the embedding and is left out."""
    tied = model.config.tie_word_embeddings
    return {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def changed_values(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> int:
    """Number of values whose bits differ."""
    return sum(int((old[name].view(torch.int16) != value.view(torch.int16)).sum()) for name, value in new.items())


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor], model: Qwen3ForCausalLM) -> None:
    """Write a whole Hugging Face folder under a temporary name, ``STABLE`` last, then rename it, so readers never see a
    partial folder.
    """
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    model.config.save_pretrained(draft)
    GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID).save_pretrained(draft)
    make_tokenizer().save_pretrained(draft)
    (draft / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    (draft / "STABLE").touch()
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)


def warm_up(
    model: Qwen3ForCausalLM,
    optimiser: torch.optim.Optimizer,
    train: Problems,
    generator: torch.Generator,
    *,
    steps: int,
    peak_lr: float,
) -> float:
    """Supervised steps at a learning rate that rises, then falls nearly to zero. Returns the last loss."""
    loss = torch.zeros(())
    rise = max(1, steps // 10)
    for step in range(steps):
        scale = min((step + 1) / rise, 1.0) * (1 - 0.95 * step / steps)
        loss = supervised_loss(model, train.draw(WARMUP_BATCH, generator))
        take_step(optimiser, model, loss, peak_lr * scale)
        if (step + 1) % 20 == 0:
            print_line(f"warm-up: step {step + 1} of {steps}, loss {loss.item():.3f}")
    return float(loss.detach())


def print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(event: str, **facts: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps({"event": event, **facts}), flush=True)


def may_publish(go_file: Path | None, step: int) -> bool:
    """Whether ``step`` may be published. The file must exist; its content is the last allowed step, and an empty file
    sets no limit.
    """
    if go_file is None:
        return True
    try:
        last = go_file.read_text().strip()
    except FileNotFoundError:
        return False
    return not last or step <= int(last)


class Snapshot(Protocol):
    def wait_snapshot(self) -> None:
        """Return when the weights may change."""


Publish = Callable[[int, Qwen3ForCausalLM], Snapshot]
"""Called with a step's weights, in addition to writing them."""


def train(options: argparse.Namespace, publish: Publish | None = None) -> None:
    """Train and write all versions, with the options of ``parser``. ``publish`` is called for each version after its
    folder is written, once the version may be published.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    problems = Problems.shuffled(generator)
    held_out, train_set = problems[:HELD_OUT], problems[HELD_OUT:]
    model = make_model(options.hidden, options.layers, tied=not options.untied)
    optimiser = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)

    loss = warm_up(model, optimiser, train_set, generator, steps=options.warmup_steps, peak_lr=options.warmup_lr)
    options.out.mkdir(parents=True, exist_ok=True)
    base = options.out / "base"
    published = snapshot(model)
    params = sum(value.numel() for value in published.values())
    write_checkpoint(base, published, model)
    right = accuracy(model, held_out)
    print_line(f"base: {params:,} parameters, loss {loss:.3f}, {right:.0%} of unseen sums right")
    report("base", step=0, path=str(base), loss=loss, accuracy=right, params=params)

    last_s = float("-inf")
    taken: Snapshot | None = None
    for step in range(1, options.versions * options.every + 1):
        loss_now, reward = policy_loss(model, train_set.draw(PROMPTS_PER_STEP, generator), generator)
        if taken is not None:
            taken.wait_snapshot()
        take_step(optimiser, model, loss_now, options.lr)
        if step % options.every:
            continue
        weights = snapshot(model)
        changed = changed_values(published, weights)
        right = accuracy(model, held_out)
        while not may_publish(options.go_file, step):
            time.sleep(WAIT_POLL_S)
        time.sleep(max(0.0, last_s + options.pace_s - time.monotonic()))
        last_s = time.monotonic()
        folder = options.out / f"step_{step}"
        write_checkpoint(folder, weights, model)
        published = weights
        taken = None if publish is None else publish(step, model)
        print_line(
            f"step {step}: reward {reward:.2f}, {right:.1%} of unseen sums right, {changed / params:.2%} of the "
            "values changed"
        )
        facts = {"loss": loss_now.item(), "reward": reward, "accuracy": right, "changed": changed, "params": params}
        report("version", step=step, path=str(folder), **facts)
    report("done")


def parser(prog: str = "python -m netem.demo.train") -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog=prog, description="A small trainer with real reinforcement learning.")
    add = out.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="Folder for base/ and step_N/.")
    add("--versions", type=_positive, default=12, help="Number of versions to publish.")
    add("--every", type=_positive, default=1, help="Optimiser steps between two versions.")
    add("--lr", type=float, default=3e-6, help="Learning rate of the RL phase.")
    add("--warmup-steps", type=_positive, default=240)
    add("--warmup-lr", type=float, default=1.5e-3)
    add("--hidden", type=_positive, default=256, help="a multiple of 128")
    add("--layers", type=_positive, default=2)
    add("--untied", action="store_true", help="A separate output layer instead of the embedding's weights.")
    add("--threads", type=_positive, default=1)
    add("--seed", type=int, default=0)
    add("--pace-s", type=float, default=0.0, metavar="SECONDS", help="Least interval between two versions in seconds.")
    add(
        "--go-file",
        type=Path,
        metavar="FILE",
        help="File to wait for after base/; its content is the last step that may be published for now.",
    )
    return out


def parse(arguments: list[str] | None = None, among: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Checked options. ``among``: a parser with further options of its own."""
    among = among or parser()
    options = among.parse_args(arguments)
    if options.hidden % 128:
        among.error("--hidden must be a multiple of 128: heads have 64 dimensions and share keys and values in pairs")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    train(parse())
