"""AdamW on bfloat16 weights, rounded stochastically."""

from __future__ import annotations

import torch

from trainer_node.learning.stochastic_adamw import StochasticAdamW, rounded_stochastically

TERMS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def steps(seed: int, count: int = 5) -> torch.Tensor:
    """bf16 weights after steps with the same gradients for each seed of the rounding."""
    drawn = torch.Generator().manual_seed(7)
    weights = torch.randn(256, generator=drawn).bfloat16().requires_grad_()
    optimizer = StochasticAdamW([weights], **TERMS)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    for _ in range(count):
        weights.grad = torch.randn(256, generator=drawn).bfloat16()
        optimizer.step()
    return weights.detach()


def test_a_value_is_rounded_up_with_the_probability_of_its_remainder() -> None:
    torch.manual_seed(1)
    low = torch.tensor([1.0, -1.0])
    gap = 2.0**-7
    for share in (0.0, 0.25, 0.75):
        wide = (low + torch.sign(low) * gap * share).repeat(20000, 1)
        found = rounded_stochastically(wide).float()
        assert set(found.abs().unique().tolist()) <= {1.0, 1.0 + gap}
        ups = (found.abs() > 1).float().mean(0)
        assert torch.allclose(ups, torch.full((2,), share), atol=0.02), (share, ups)


def test_values_that_bf16_has_and_values_that_are_not_finite_stay() -> None:
    wide = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-40, float("inf"), float("-inf"), float("nan")])
    kept = wide.bfloat16()
    exact = kept.float() == wide
    for _ in range(50):
        found = rounded_stochastically(wide)
        assert torch.equal(found[exact], kept[exact])
        assert found[-1].isnan()
        assert torch.equal(torch.signbit(found[:2]), torch.tensor([False, True]))


def test_the_mean_over_many_roundings_is_the_update_in_fp32() -> None:
    drawn = torch.Generator().manual_seed(7)
    masters = torch.randn(256, generator=drawn).bfloat16().float().requires_grad_()
    reference = torch.optim.AdamW([masters], **TERMS)  # type: ignore[arg-type]
    masters.grad = torch.randn(256, generator=drawn).bfloat16().float()
    reference.step()
    mean = torch.stack([steps(seed, 1).float() for seed in range(400)]).mean(0)
    unit = 2.0**-7 * masters.detach().abs()
    assert ((mean - masters.detach()).abs() <= 5 * unit / 400**0.5 + 1e-6).all()


def test_updates_below_half_a_unit_are_not_lost() -> None:
    weights = torch.ones(4096, dtype=torch.bfloat16).requires_grad_()
    optimizer = StochasticAdamW([weights], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    torch.manual_seed(3)
    for _ in range(20):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    assert abs(float(weights.detach().float().mean()) - (1 - 20e-4)) < 2e-4


def test_equal_seeds_give_equal_weights() -> None:
    assert torch.equal(steps(1), steps(1))
    assert not torch.equal(steps(1), steps(2))


def test_a_weight_without_a_gradient_stays() -> None:
    weights = torch.ones(8, dtype=torch.bfloat16).requires_grad_()
    optimizer = StochasticAdamW([weights], **TERMS)  # type: ignore[arg-type]
    optimizer.step()
    assert torch.equal(weights.detach(), torch.ones(8, dtype=torch.bfloat16))
    assert not optimizer.state
