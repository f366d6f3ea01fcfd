from __future__ import annotations

import pytest
import torch

from examples.research.staged_training import OrthogonalSteps, orthogonal


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 40), (40, 16)])
def test_orthogonal_matrices_keep_their_directions(rows: int, columns: int) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(3, rows, columns) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    found = orthogonal(matrices)
    assert found.shape == matrices.shape
    left, sizes, right = torch.linalg.svd(matrices, full_matrices=False)
    turned = left.mT @ found @ right.mT
    large = sizes > 0.1 * sizes[:, :1]
    values = turned.diagonal(dim1=1, dim2=2)[large]
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (turned - torch.diag_embed(turned.diagonal(dim1=1, dim2=2))).abs().max() < 1e-2


def test_steps_go_down_and_keep_their_size() -> None:
    torch.manual_seed(1)
    wanted, weight = torch.randn(8, 8), torch.nn.Parameter(torch.zeros(8, 8))
    steps = OrthogonalSteps([weight])
    losses = []
    for _ in range(120):
        weight.grad = None
        loss = (weight - wanted).square().mean()
        loss.backward()
        losses.append(loss.item())
        before = weight.detach().clone()
        steps.step(0.05)
        assert torch.linalg.matrix_norm(weight.detach() - before, 2) < 0.05 * 1.3
    assert losses[-1] < 0.05 * losses[0]
