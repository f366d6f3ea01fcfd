"""The optimiser Muon (Jordan et al., 2024), in fp32: that of torch works in bfloat16, which old CPUs compute slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

MOMENTUM: Final = 0.95
_ROUNDS: Final = 5
_POWERS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, as in the authors' text."""


class OrthogonalSteps:
    """``matrices``: of two dimensions. Matrices of equal shape are computed at once."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for one in matrices:
            shapes.setdefault(one.shape, []).append(one)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, rate: float) -> None:
        """``rate``: spectral norm of a step of a wide or square matrix, about."""
        for group, momentum in self._groups:
            slopes = torch.stack([one.grad for one in group if one.grad is not None])
            momentum.lerp_(slopes, 1 - MOMENTUM)
            rows, columns = group[0].shape
            steps = orthogonal(slopes.lerp(momentum, MOMENTUM)) * (rate * max(1.0, rows / columns) ** 0.5)
            for one, change in zip(group, steps, strict=True):
                one.sub_(change)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``matrices``, of shape (count, rows, columns), with singular values of about 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = _POWERS
    for _ in range(_ROUNDS):
        square = found @ found.mT
        found = first * found + (third * square + fifth * square @ square) @ found
    return found.mT if tall else found
