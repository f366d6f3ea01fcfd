"""Plays a trainer on Tinker: ``tinker_training.py LEDGER BEARER JOURNAL FIRST STEPS CHECKPOINT``. Prints each batch.

Takes the batches of the steps FIRST to STEPS - 1. Before the last of them, names the checkpoint of CHECKPOINT steps.
"""

from __future__ import annotations

import json
import sys

import tinker

from trainer_node.frameworks.tinker import INPUTS, LedgerDatums

url, bearer, journal, first, steps, checkpoint = sys.argv[1:]
ledger = LedgerDatums(url, journal, bearer_file=bearer, inputs=INPUTS)
ledger.begin(0, int(first))
for step in range(int(first), int(steps)):
    data = ledger.take(step)
    assert all(isinstance(one, tinker.Datum) for one in data)
    if step == int(checkpoint):
        ledger.acknowledge(step)
    said = [
        {"model_input": one.model_input.to_ints(), **{name: one.loss_fn_inputs[name].tolist() for name in INPUTS}}
        for one in data
    ]
    print(json.dumps({"step": step, "data": said}))
if int(checkpoint) == int(steps):
    ledger.acknowledge(int(steps))
