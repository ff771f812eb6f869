"""The kit's own arithmetic against torch, without a server: `pytest tests/conformance/test_oracles.py`."""

import numpy as np
import oracles
import pytest
import torch

CONFIGS = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}),
    ("dro", {}),
    ("dro", {"beta": 0.4}),
]


def by_torch(name: str, logp: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, config) -> torch.Tensor:
    ratio = (logp - logprobs).exp()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "dro":
        return -(logp * advantages - 0.5 * config.get("beta", 0.05) * (logp - logprobs) ** 2).sum()
    defaults = (0.8, 1.2) if name == "ppo" else (0.0, 4.0)
    clipped = ratio.clamp(config.get("clip_low_threshold", defaults[0]), config.get("clip_high_threshold", defaults[1]))
    if name == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return -(clipped.detach() * logp * advantages).sum()


@pytest.mark.parametrize("name,config", CONFIGS)
def test_losses_and_slopes_equal_autograd(name: str, config: dict) -> None:
    generator = torch.Generator().manual_seed(7)
    logp = (-3 * torch.rand(200, generator=generator, dtype=torch.float64)).requires_grad_()
    logprobs = logp.detach() + torch.randn(200, generator=generator, dtype=torch.float64)
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    expected = by_torch(name, logp, logprobs, advantages, config)
    (slope,) = torch.autograd.grad(expected, logp)
    found = oracles.policy_loss(name, logp.detach(), logprobs, advantages, config)
    assert found.value == pytest.approx(expected.item(), abs=1e-12)
    np.testing.assert_allclose(found.slope, slope, atol=1e-12)


def test_one_step_moves_like_many_with_lr_zero() -> None:
    gradient = torch.tensor([3.0, -0.2, 1e-3, 0.0], dtype=torch.float64)
    start = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
    steps = [
        oracles.AdamStep(1.0, 0.0, 0.9, 0.95, 1e-8, 0.3),
        oracles.AdamStep(-3.0, 0.0, 0.5, 0.9, 1e-3, 0.0),
        oracles.AdamStep(0.5, 0.2, 0.8, 0.99, 1e-2, 0.1),
    ]

    def walk(path: list[oracles.AdamStep]) -> torch.Tensor:
        parameter = start.clone().requires_grad_()
        optimizer = torch.optim.AdamW([parameter])
        for step in path:
            optimizer.param_groups[0].update(
                lr=step.lr, betas=(step.beta1, step.beta2), eps=step.eps, weight_decay=step.weight_decay
            )
            parameter.grad = step.scale * gradient
            optimizer.step()
        return parameter.detach()

    torch.testing.assert_close(walk(steps), walk([oracles.one_step_like(steps)]), atol=1e-14, rtol=0)
    assert (walk(steps) - start).abs().max() > 0.05
