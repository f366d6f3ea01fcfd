"""Checks batches by atropos's own data types: ``atropos_types.py FILE``, with a batch of ScoredData in each line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from atroposlib.api.server import Info, Registration, ScoredData, Status

REGISTRATION = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "out",
    "save_checkpoint_interval": 2,
    "starting_step": 0,
    "num_steps": 4,
}

lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
for line in lines:
    for item in line["batch"]:
        assert set(item) == set(ScoredData.model_fields)
        assert ScoredData(**item).model_dump() == item
    Status(**line["status"])
    Info(**line["info"])
assert Registration(**REGISTRATION).model_dump() == REGISTRATION
print(len(lines))
