"""The torch device on which a benchmark computes."""

from __future__ import annotations

import torch


def torch_device(name: str | None) -> torch.device:
    """``name``: None for the GPU if there is one, otherwise the CPU."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_name(device: torch.device) -> str:
    """For a table's title."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def settle(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
