"""Runs TRL's example and looks at each of its syncs: ``python checked_syncs.py FOUND PEERS PROGRAM …``.

PEERS: state folders of peers, divided by commas. After each sync, the weights that every peer has staged are compared
with the tensors that the trainer has given. FOUND gets one line of JSON for each sync:

    version, peers, differing   the version, peers that were looked at, words that differ there
    copy_s, store_s, live_s     seconds until the weights may change, until the hub has the version, until engines serve
    save_model_s                seconds of TRL's own way to a folder, ``save_model``
    model_bytes, sent_bytes     of the published model and of the version's artifact
    changed                     share of the words that have changed
    grown_bytes, kept_bytes     peak of this process's memory in the sync, and its memory after, less that before

The learning rate is that of RL (LEARNING_RATE); the example's is higher, so that few steps change something.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl_on_cpu
from trl.experimental.async_grpo import AsyncGRPOTrainer

import trainer_node.frameworks.trl as adapter
from p2pcast import Reader

FOUND, PEERS = Path(sys.argv[1]), sys.argv[2].split(",")
KIB = 1024
LEARNING_RATE = 3e-6


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(key))


class Checked(adapter.P2PCast):
    """Compares and measures."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        live: dict[str, torch.Tensor] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in iterator:
                # The trainer has one rank here, so its tensors live on, and they change in its next step alone.
                live[name] = tensor
                yield name, tensor

        before = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began = time.monotonic()
        # The waits of a sync with engines, one by one.
        live_fraction, self._live_fraction = self._live_fraction, None
        super().send_weights(noted())
        self._live_fraction = live_fraction
        copied = time.monotonic()
        self._handle.wait_durable(self._live_timeout_s)
        stored = time.monotonic()
        self._handle.wait_live(live_fraction, self._live_timeout_s)
        ended = time.monotonic()
        durable = self._handle.durable
        line: dict[str, Any] = {
            "copy_s": copied - began,
            "store_s": stored - began,
            "live_s": ended - began,
            "sent_bytes": durable.bytes,
            "changed": durable.changed / durable.params,
            "grown_bytes": status_bytes("VmHWM") - before,
            "kept_bytes": status_bytes("VmRSS") - before,
            "version": str(self.version()),
            "model_bytes": sum(2 * tensor.numel() for tensor in live.values()),
            "differing": 0,
            "peers": 0,
        }
        for peer in PEERS:
            with Reader(peer) as version:
                staged = dict(version.tensors())
                assert version.version == self.version()
                assert staged.keys() == live.keys()
                for name, tensor in live.items():
                    exact = tensor.to(torch.bfloat16).view(torch.int16)
                    line["differing"] += int((exact != staged[name].view(torch.int16)).sum())
                del staged
            line["peers"] += 1
        folder = FOUND.with_name("saved")
        began = time.monotonic()
        Made.trainer.save_model(str(folder))
        line["save_model_s"] = time.monotonic() - began
        shutil.rmtree(folder)
        with FOUND.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Made(AsyncGRPOTrainer):
    """The trainer of the example, for ``save_model``."""

    trainer: Made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named["args"].learning_rate = LEARNING_RATE
        super().__init__(*arguments, **named)
        Made.trainer = self


if __name__ == "__main__":
    import trl.experimental.async_grpo as package

    assert trl_on_cpu
    adapter.P2PCast = Checked  # type: ignore[misc]
    package.AsyncGRPOTrainer = Made
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
