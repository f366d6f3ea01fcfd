"""Plays slime's train.py for two versions: ``played_slime.py OUT [options of slime]``. OUT gets JSON at the end.

Each version is a folder in ``--update-weight-disk-dir``, and slime's hook is called after each write. With a rollout
function, a rollout follows each version.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.daemons.conftest import first_state, trained, write

VERSIONS = 2


def function(path: str) -> Callable[..., Any]:
    """As slime finds the functions that its options name."""
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--update-weight-transport", choices=["disk"], required=True)
parser.add_argument("--update-weight-disk-dir", type=Path, required=True)
parser.add_argument("--custom-update-weight-post-write-path", required=True)
for option in ("save", "load", "custom-config-path", "rollout-function-path", "custom-reward-post-process-path"):
    parser.add_argument(f"--{option}")
args = parser.parse_args()
types = ModuleType("slime.utils.types")
types.Sample = type("Sample", (SimpleNamespace,), {"Status": SimpleNamespace(COMPLETED=0, TRUNCATED=1)})  # type: ignore[attr-defined]
sys.modules["slime.utils.types"] = types
for name, value in {
    "rollout_batch_size": 2, "n_samples_per_prompt": 4, "global_batch_size": 8, "rollout_temperature": 1.0,
    "advantage_estimator": "grpo", "update_weights_interval": 1,
}.items():  # fmt: skip
    setattr(args, name, value)

start = 0
if args.custom_config_path:
    name, _, number = Path(args.custom_config_path).read_text().partition(": ")
    assert name == "update_weight_start_version"
    start = int(number)
hook, state = function(args.custom_update_weight_post_write_path), first_state()
samples = []
for version in range(start + 1, start + 1 + VERSIONS):
    state = trained(state, version)
    folder = write(args.update_weight_disk_dir / f"weight_v{version:06}", state)
    (folder / "STABLE").unlink()
    hook(args, str(folder), [])
    if args.rollout_function_path:
        groups = function(args.rollout_function_path)(args, version - 1, None)
        flat = [one for group in groups for one in group]
        function(args.custom_reward_post_process_path)(args, flat)
        samples.append(len(flat))
args.out.write_text(json.dumps({"versions": [start + 1, start + VERSIONS], "samples": samples}))
