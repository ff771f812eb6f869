"""Both sides' log-probabilities of the same tokens, and gradients by calls: what several GPU tests ask of a stack."""

import asyncio

import torch

from tests.gpu.conftest import KL, LOGPROB
from tests.integration.helpers import flat, random_datums
from torchtitan_rl.algorithm.losses import cross_entropy, importance_sampling
from torchtitan_rl.types import Datum, OptimParams, SamplingParams

# 19 tokens; completions of different lengths leave 4, 3, 2 and at last 1 sequence to decode.
PROMPTS = [[20, 31, 27], [22, 40, 21, 14], [30, 35, 36, 39, 14], [25, 26, 27, 28, 29, 30, 14]]


async def train(controller, seed: int = 0, lr: float = 1e-2) -> None:
    """One optimizer step on made-up data."""
    await controller.trainer.forward_backward(random_datums(6, seed=seed), cross_entropy)
    assert not (await controller.trainer.optim_step(OptimParams(lr=lr))).skipped


async def both(controller) -> tuple[torch.Tensor, torch.Tensor]:
    """(generator's, trainer's) log-probabilities of scored data and of sampled completions."""
    data = random_datums(7)
    scored = await asyncio.gather(
        *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in data)
    )
    sampled = await asyncio.gather(
        *(controller.generator.sample(p, SamplingParams(max_tokens=5 + i, seed=i)) for i, p in enumerate(PROMPTS))
    )
    trained = (await controller.trainer.forward(data)).policy_logprobs
    sequences = [torch.tensor(p + c.tokens) for p, c in zip(PROMPTS, sampled)]
    again = await controller.trainer.forward(
        [Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs={}) for tokens in sequences]
    )
    tails = [row[-len(c.tokens) :] for row, c in zip(again.policy_logprobs, sampled)]
    return (
        torch.cat([torch.tensor(s) for s in scored] + [torch.tensor(c.logprobs) for c in sampled]),
        torch.cat([*trained, *tails]),
    )


def check_agreement(
    generated: torch.Tensor, trained: torch.Tensor, *, largest: float = LOGPROB, kl: float = KL
) -> None:
    difference = trained.double() - generated.double()
    assert difference.abs().max() <= largest
    assert (torch.expm1(difference) - difference).mean() <= kl


async def gradient(trainer, calls, loss_fn=importance_sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities of all calls' datums in order, gradient); what has accumulated is dropped again."""
    outputs = [await trainer.forward_backward(data, loss_fn) for data in calls]
    gradients = flat(await trainer.gradients())
    assert not (await trainer.optim_step(OptimParams(lr=0.0))).skipped
    return torch.cat([row for output in outputs for row in output.policy_logprobs]), gradients
