"""The torch device of tests marked ``device``: the CPU, or the one that P2PCAST_TEST_DEVICE names (``cuda``)."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("P2PCAST_TEST_DEVICE", "cpu"))
CUDA = DEVICE if DEVICE.type == "cuda" else None
"""The device where it needs streams and pinned memory."""
