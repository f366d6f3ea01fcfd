"""``PublishCallback`` in a real Trainer, with a real hub and peer. Two ranks: tests of the examples."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from p2pcast import Reader
from p2pcast.ground.errors import UsageError
from tests.examples.test_examples import Stage
from tests.trainer_node.learning.expert_models import experts_folder
from trainer_node.frameworks.transformers_callback import PublishCallback
from trainer_node.frameworks.tried_versions import untried
from trainer_node.sdk.snapshot import Rooms

STAGED_S = 120
COPY_S = 1.0


class Compared(TrainerCallback):
    """Behind ``PublishCallback``: waits until the peer has each version, and compares it with the trainer's tensors.
    The versions stand in ``seen``.
    """

    def __init__(self, stage: Stage, publishing: PublishCallback) -> None:
        self.stage, self.publishing, self.seen = stage, publishing, []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.look(state.global_step, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.look(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.look(state.global_step, model)

    def look(self, step: int, model: Any) -> None:
        """The peer's newest version, if it has this step."""
        if self.publishing._published != step or (self.seen and self.seen[-1].endswith(f".{step}")):
            return
        self.stage.until(f"the peer has step {step}", lambda: self.staged_step() == step)
        state = model.state_dict()
        with Reader(self.stage.folder / "peer", wait_s=STAGED_S) as version:
            for name, tensor in version.tensors():
                exact = state[name].to(torch.bfloat16)
                assert torch.equal(exact.view(torch.int16), tensor.view(torch.int16)), f"{version.version} {name}"
            self.seen.append(str(version.version))

    def staged_step(self) -> int:
        with Reader(self.stage.folder / "peer", wait_s=STAGED_S) as version:
            return version.version.step


class Once(TrainerCallback):
    """Calls ``act`` at one event of one step."""

    def __init__(self, event: str, step: int, act: Any) -> None:
        self.step, self.act = step, act
        setattr(self, event, self.called)

    def called(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def trainer(stage: Stage, *callbacks: TrainerCallback, steps: int = 5) -> Trainer:
    model = AutoModelForCausalLM.from_pretrained(stage.base, dtype=torch.float32)
    texts = torch.randint(model.config.vocab_size, (64, 8), generator=torch.Generator().manual_seed(0))
    return Trainer(
        model=model,
        args=TrainingArguments(
            str(stage.folder / "out"),
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=list(callbacks),
    )


def publishing(stage: Stage, **options: Any) -> PublishCallback:
    return PublishCallback(stage.hub, token_file=stage.token, base=stage.base, **options)


def test_versions_are_the_trainers_weights_before_and_after_a_restart(stage: Stage) -> None:
    stage.joined_with_folder()
    callback = publishing(stage, every_steps=2, live_fraction=1.0, timeout_s=STAGED_S)
    compared = Compared(stage, callback)
    trainer(stage, callback, compared).train()
    assert compared.seen == ["0.2", "0.4", "0.5"]

    # The restart is at step 4; the version of step 5 is left behind on its branch.
    again = publishing(stage, every_steps=2)
    compared = Compared(stage, again)
    trainer(stage, again, compared, steps=7).train(resume_from_checkpoint=str(stage.folder / "out" / "checkpoint-4"))
    assert compared.seen == ["1.4", "1.6", "1.7"]

    # Another run, from its first step, at the same hub.
    other = publishing(stage, every_steps=9)
    compared = Compared(stage, other)
    trainer(stage, other, compared, steps=9).train()
    assert compared.seen == ["2.9"]


def test_training_goes_on_when_a_version_is_lost(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    hub = stage.processes.children["hub"]
    callback = publishing(stage, timeout_s=STAGED_S)

    def stop() -> None:
        callback._handle.wait_durable(STAGED_S)
        hub.signal(signal.SIGSTOP)

    def restart() -> None:
        # A version whose thread finds the hub away before it begins is sent to the next hub.
        stage.until("the version of step 2 has a connection", lambda: callback._handle.uplink is not None)
        hub.expected = True
        hub.signal(signal.SIGKILL)
        hub.process.wait()
        stage.hub_up()

    # A step begins with the number of the step before: the hub is stopped before the version of step 2.
    with caplog.at_level(logging.WARNING, "p2pcast.transformers"):
        trainer(stage, Once("on_step_begin", 1, stop), callback, Once("on_step_end", 2, restart), steps=4).train()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "p2pcast.transformers"]
    assert said.startswith("training goes on, and step 3 is tried next: ")
    stage.until("the hub has step 4", lambda: stage.status("hub").get("version") == "0.4")


def test_optimiser_waits_for_the_copy(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is held back until the next optimiser step, or for COPY_S if that step waits."""
    installed, stepped, truth = stage.joined_with_folder(), threading.Event(), {}
    finish = Rooms.finish

    def late(rooms: Rooms) -> None:
        stepped.wait(COPY_S)
        finish(rooms)

    def keep() -> None:
        truth.update({name: tensor.to(torch.bfloat16) for name, tensor in training.model.state_dict().items()})

    def step_and_fail() -> None:
        stepped.set()
        raise ZeroDivisionError

    monkeypatch.setattr(Rooms, "finish", late)
    callback = publishing(stage)
    training = trainer(stage, callback, Once("on_step_end", 1, keep), Once("on_optimizer_step", 1, step_and_fail))
    with pytest.raises(ZeroDivisionError):
        training.train()
    callback._handle.wait_live(1.0, STAGED_S)
    found = load_file(installed / "step_1" / "model.safetensors")
    assert all(torch.equal(found[name].view(torch.int16), truth[name].view(torch.int16)) for name in found)


def test_call_after_an_error_of_training_begins_anew(stage: Stage) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    callback = publishing(stage)
    failing = Once("on_step_end", 2, fail)
    training = trainer(stage, callback, failing, steps=3)
    with pytest.raises(ZeroDivisionError):
        training.train()
    training.remove_callback(failing)
    training.train()
    assert callback._publisher is None


def test_other_tensors_than_the_bases_end_training(stage: Stage) -> None:
    training = trainer(stage, publishing(stage, rename={"model.norm.weight": "norm"}))
    with pytest.raises(UsageError, match=r"(?s)missing: model\.norm\.weight.*unexpected: norm"):
        training.train()


def test_fused_experts_are_listed_as_differences(stage: Stage) -> None:
    training = trainer(stage)
    training.model = AutoModelForCausalLM.from_pretrained(experts_folder(stage.folder / "experts"))
    training.add_callback(PublishCallback(stage.hub, token_file=stage.token, base=stage.folder / "experts"))
    training.callback_handler.model = training.model
    with pytest.raises(UsageError, match=r"(?s)missing: .*experts\.0\.gate_proj.*unexpected: .*experts\.gate_up_proj"):
        training.train()


def test_unmerged_adapters_are_refused(stage: Stage) -> None:
    training = trainer(stage, publishing(stage))
    training.model.peft_config = {}
    with pytest.raises(UsageError, match="does not merge adapters"):
        training.train()


def test_fsdp1_and_deepspeed_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from trainer_node.frameworks.transformers_callback import _check

    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(flat)
    with pytest.raises(UsageError, match="set fsdp_version to 2"):
        _check(nn.Sequential(flat), None)
    with pytest.raises(UsageError, match="DeepSpeed"):
        _check(nn.Linear(1, 1), {"zero_optimization": {"stage": 3}})
    with pytest.raises(UsageError, match="no model"):
        _check(None, None)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="every_steps=0"):
        PublishCallback("hub:7077", every_steps=0)
    with pytest.raises(UsageError, match="live_fraction=2"):
        PublishCallback("hub:7077", live_fraction=2)


def test_versions_that_were_not_tried_are_named() -> None:
    assert untried("TRL", "1.16.0", ["1.16"]) is None
    assert untried("TRL", "1.16", ["1.15", "1.16"]) is None
    for other in ("1.17.0", "1.1", "1.160.0", "2.0"):
        said = untried("TRL", other, ["1.16"])
        assert said is not None
        assert f"TRL {other} is installed" in said
