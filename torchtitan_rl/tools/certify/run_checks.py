"""What a run adds to a policy: a critic, and one step of GRPO."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan_rl.algorithm import presets
from torchtitan_rl.algorithm.losses import value_loss
from torchtitan_rl.config import RunConfig, SamplingConfig, SupervisedConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.largest_difference import LOGPROBS, of_pairs
from torchtitan_rl.tools.certify.subject import Subject
from torchtitan_rl.types import Datum, OptimParams, Task

__all__ = ["check_critic", "check_grpo", "refusal"]


async def check_critic(subject: Subject, critic: TrainingClient) -> CertificateLine:
    """A critic's values after one step. Its head begins at zero, so the step moves the head alone, and its values are
    the product of that head and transformers' hidden states."""
    data = [_with_returns(datum) for datum in subject.data(subject.documents)]
    await critic.forward_backward(data, value_loss)
    await critic.optim_step(OptimParams(lr=1e-1, max_grad_norm=math.inf))
    head = (await critic.parameters())["lm_head.weight"]
    values = (await critic.forward(data)).values
    pairs = [
        (f"lm_head: {len(d)} tokens", row, (subject.reference.hidden(d) @ head[0])[:-1])
        for d, row in zip(subject.documents, values, strict=True)
    ]
    if not head.abs().max() > 0:
        return CertificateLine(
            name="critic: values", difference=math.inf, part="lm_head", note="the value head does not learn"
        )
    return of_pairs("critic: values = transformers' states x head", pairs, LOGPROBS, relative=True)


def _with_returns(datum: Datum) -> Datum:
    inputs = datum.loss_inputs
    weights = torch.full_like(inputs["loss_mask"], 1e-2)
    returns = {"returns": inputs["token_weights"], "values": torch.zeros_like(weights), "token_weights": weights}
    return Datum(tokens=datum.tokens, target_tokens=datum.target_tokens, loss_inputs=inputs | returns)


def _reward(task: Task, completions: list[str]) -> list[float]:
    """Differs between completions of a random model."""
    return [float(len(set(text))) for text in completions]


def _grpo(subject: Subject, output_dir: Path, model_impl: Literal["torchtitan", "vllm"] = "torchtitan") -> RunConfig:
    config = subject.run_config(model_impl=model_impl)
    config.task = LetterSort.Config(reward=_reward)
    config.algorithm = presets.grpo(tasks_per_step=4, group_size=4)
    config.supervised = SupervisedConfig(num_steps=0)
    config.sampling = SamplingConfig(max_prompt_tokens=16, max_tokens=16)
    config.controller.num_steps, config.controller.eval_every = 1, 0
    config.output_dir = str(output_dir)
    return config


def refusal(subject: Subject, output_dir: Path, *, model_impl: Literal["torchtitan", "vllm"]) -> str:
    """Why no run of this model may sample with an engine of this kind; empty: it may."""
    from torchtitan_rl.validation.run import validate

    try:
        validate(_grpo(subject, output_dir, model_impl))
    except ValueError as error:
        return str(error)
    return ""


async def check_grpo(subject: Subject, output_dir: Path) -> list[CertificateLine]:
    """One step by the controller: sampled, judged, trained on, published."""
    from torchtitan_rl.train.controller import Controller

    async with await Controller.launch(_grpo(subject, output_dir), backend="local") as controller:
        batch = await controller.batches.next_batch()
        line = await controller.train_on(batch.groups, batch.sampled)
        await asyncio.wait_for(controller.publish(), subject.run_config().controller.call_timeout_s)
    return _of_metrics(line)


def _of_metrics(line: dict[str, Any]) -> list[CertificateLine]:
    name = "one GRPO step: every metric is a finite number"
    if bad := sorted(n for n, value in line.items() if isinstance(value, float) and not math.isfinite(value)):
        return [CertificateLine(name=name, difference=float(len(bad)), part=bad[0])]
    if not line["reward/std"] > 0 or not line["optim/grad_norm"] > 0:
        return [CertificateLine(name=name, difference=math.inf, note="the step has nothing to learn from")]
    difference = float(line["mismatch/logprob_diff_max"])
    return [
        CertificateLine(name=name, difference=0.0),
        CertificateLine(
            name="one GRPO step: engine = trainer on sampled tokens", difference=difference, tolerance=LOGPROBS
        ),
    ]
