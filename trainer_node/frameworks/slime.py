"""slime: its engines read a folder only when every rollout machine has it. Written against slime's source, not run.

    python train.py … --update-weight-disk-dir /weights \\
        --custom-update-weight-post-write-path trainer_node.frameworks.slime.publish_folder

slime writes a whole checkpoint into ``/weights/weight_v000007``, calls the hook on every rank, and then has each engine
load this path. The hub reads the folder on the trainer's machine (``seed /weights --step-names 'weight_v{step:06}'``),
and peers write the same path on rollout machines (``join … --install safetensors:/weights`` with the same names).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2pcast.checkpoint.folder_form import STABLE
from p2pcast.daemon.daemon_requests import DEFAULT_URL
from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.live_folder import WAIT_S, wait_live

HUB, HOSTS, TIMEOUT = "P2PCAST_HUB_HTTP", "P2PCAST_ROLLOUT_HOSTS", "P2PCAST_LIVE_TIMEOUT_S"
"""Environment variables: the URL of the hub's HTTP server, the number of rollout machines, and the longest wait in
seconds.
"""


def publish_folder(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """slime's hook after a write. Rank 0 marks the folder complete and waits; slime's barrier holds the other ranks.

    ``version_dir``: the folder with the whole checkpoint. Raises RetryableError when the engines do not serve it in
    time, UsageError for a value of the environment that is no number; slime's training then ends with the error.
    """
    if _rank() != 0:
        return
    folder = Path(version_dir)
    (folder / STABLE).touch()
    hub, hosts = os.environ.get(HUB, DEFAULT_URL), int(_number(HOSTS, 1))
    wait_live(hub, folder.name, hosts=hosts, timeout_s=_number(TIMEOUT, WAIT_S))


def _rank() -> int:
    import torch.distributed

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _number(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise UsageError(f"{variable}={text!r} is not a number") from None
