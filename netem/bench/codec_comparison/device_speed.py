"""The dense passes of coding and audit with torch's operations, on a GPU if there is one, otherwise on the CPU. Rates
are bytes of state a second, beside a copy.

The timed passes are those of publisher and engines:

- comparing, and copying the changed entries to the host (``device.compare``)
- the digest of a row
- ranks within classes
- writing and reading a patch

Passes take turns with a copy of the same bytes, and medians are compared. Entropy coding runs on the CPU and belongs to
``bench codec``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from netem.bench.measuring import device_clock, device_name, take_turns, torch_device
from p2pcast.device import RUN_BYTES, class_ranks, compare, digest_row
from p2pcast.ground import limits

SHARE = 0.012
CLASSES = (8, 110, 11)
"""Shift, base and top: the exponents of bf16 weights around 0.02."""
SPARSE = 16


def bench_device(state_bytes: int, rounds: int, *, device: str | None = None) -> dict[str, Any]:
    """``state_bytes`` of bf16 on ``device`` (None: the GPU, if there is one). Takes 3 × that of its memory, and half as
    much for work.
    """
    where = torch_device(device)
    words = max(1, state_bytes // 2)
    old, new = _states(words, where)
    spare = torch.empty_like(old)
    places = (old != new).nonzero().view(-1)
    values = new.index_select(0, places)
    passes: dict[str, Callable[[], object]] = {
        "copy": lambda: spare.copy_(old),
        "compare": lambda: _compare(old, new),
        "digest": lambda: _by_cells(old, lambda row, first: digest_row(row, first, 0)),
        "ranks": lambda: _ranks(old, places),
        "scatter": lambda: (spare.index_put_((places,), values), spare.index_select(0, places)),
    }
    medians = take_turns(passes, rounds, device_clock(where))
    return {
        "device": device_name(where),
        "state_bytes": 2 * words,
        "changed": places.numel(),
        "params": words,
        "rounds": rounds,
        "rows": [
            {
                "pass": name,
                "s": seconds,
                "state_bytes_per_s": 2 * words / seconds,
                "speed_to_copy": round(medians["copy"] / seconds, 4),
            }
            for name, seconds in medians.items()
        ],
    }


def _states(words: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of weights around 0.02, and the same words with some of them one step further."""
    generator = torch.Generator(device).manual_seed(0)
    old = torch.empty(words, dtype=torch.int16, device=device)
    new = torch.empty_like(old)
    for first in range(0, words, limits.CELL_WORDS):
        row = old[first : first + limits.CELL_WORDS]
        row.copy_(
            torch.randn(row.numel(), generator=generator, device=device).mul_(0.02).to(torch.bfloat16).view(torch.int16)
        )
        moved = torch.rand(row.numel(), generator=generator, device=device) < SHARE
        new[first : first + limits.CELL_WORDS] = row + moved.to(torch.int16)
    return old, new


def _compare(old: torch.Tensor, new: torch.Tensor) -> None:
    """Compare as a publisher does: run by run, in parts of a cell."""
    step = RUN_BYTES // 2
    for first in range(0, old.numel(), step):
        was, now = old[first : first + step], new[first : first + step]
        parts = [(at, min(limits.CELL_WORDS, was.numel() - at)) for at in range(0, was.numel(), limits.CELL_WORDS)]
        assert compare(was, now, parts, SPARSE) is not None


def _by_cells(row: torch.Tensor, work: Callable[[torch.Tensor, int], object]) -> None:
    for first in range(0, row.numel(), limits.CELL_WORDS):
        work(row[first : first + limits.CELL_WORDS], first)


def _ranks(row: torch.Tensor, places: torch.Tensor) -> None:
    def work(cell: torch.Tensor, first: int) -> None:
        begin, end = torch.searchsorted(
            places, torch.tensor([first, first + cell.numel()], device=places.device)
        ).tolist()
        class_ranks(cell, places[begin:end] - first, *CLASSES)

    _by_cells(row, work)
