"""Recorded-like data for the trainer, made by hand."""

import asyncio
import time

import torch

from tests.kit.processes import ended
from torchtitan_rl.train.step import training_data
from torchtitan_rl.types import Datum


def random_datums(num: int, *, seed: int = 0, min_len: int = 2, max_len: int = 14) -> list[Datum]:
    """Ragged datums with non-zero advantages; weights are a token mean over all of them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(min_len, max_len + 1, (num,), generator=generator).tolist()
    masks = []
    for length in lengths:
        mask = torch.ones(length)
        mask[: length // 3] = 0
        masks.append(mask)
    total = sum(float(mask.sum()) for mask in masks)
    datums = []
    for length, mask in zip(lengths, masks):
        tokens = torch.randint(3, 60, (length + 1,), generator=generator)
        advantage = torch.randn((), generator=generator)
        datums.append(
            Datum(
                tokens=tokens[:-1],
                target_tokens=tokens[1:],
                loss_inputs={
                    "loss_mask": mask,
                    "token_weights": mask / total,
                    "advantages": mask * advantage,
                    "sampling_logprobs": mask * (torch.randn(length, generator=generator) * 0.1 - 4.1),
                },
            )
        )
    return datums


def siblings(sizes: list[int], *, prompt: int = 12) -> list[Datum]:
    """Groups of so many datums that begin with one prompt of so many tokens; of the prompt nothing trains."""
    datums = []
    for seed, size in enumerate(sizes):
        group = random_datums(size, seed=seed, min_len=prompt + 2, max_len=prompt + 6)
        for datum in group:
            datum.tokens[:prompt] = group[0].tokens[:prompt]
            datum.target_tokens[: prompt - 1] = group[0].tokens[1:prompt]
            mask = (torch.arange(len(datum)) >= prompt - 1).float()
            for name, column in datum.loss_inputs.items():
                datum.loss_inputs[name] = mask if name == "loss_mask" else mask * column
            datums.append(datum)
    return datums


def distillation_datums(num: int, *, seed: int, dim: int, num_targets: int = 3, **lengths) -> list[Datum]:
    """Ragged datums with several targets and weights a token, and a teacher's hidden states, all made up."""
    generator, made = torch.Generator().manual_seed(seed), []
    for datum in random_datums(num, seed=seed, **lengths):
        length, mask_T = len(datum), datum.loss_inputs["loss_mask"]
        shares_TK = torch.rand(length, num_targets, generator=generator)
        made.append(
            Datum(
                tokens=datum.tokens,
                target_tokens=torch.rand(length, 60, generator=generator).argsort(1)[:, :num_targets],
                loss_inputs={
                    "loss_mask": mask_T,
                    "token_weights": shares_TK * datum.loss_inputs["token_weights"][:, None],
                    "teacher_hidden": torch.randn(length, dim, generator=generator),
                },
            )
        )
    return made


async def scored_by(controller, groups) -> list[Datum]:
    """Training data of groups, with what the controller's roles say of them."""
    return await training_data(groups, controller.roles, controller.config.algorithm)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if tensors[name] is not None])


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


async def gone(pid: int) -> None:
    """Waits until a process has ended."""
    deadline = time.monotonic() + 15
    while not ended(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        await asyncio.sleep(0.1)
