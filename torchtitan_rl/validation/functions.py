"""Calls a run's functions on a few made-up numbers, to refuse a wrong function before a process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torchtitan_rl.algorithm.advantages import estimate_advantages, sees_group
from torchtitan_rl.algorithm.credit import credits_of
from torchtitan_rl.algorithm.terms import same_sequences
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.resolve import named
from torchtitan_rl.metrics import REINFORCEMENT, is_metric
from torchtitan_rl.record.user_code import defined_at, described, raised_at
from torchtitan_rl.types import Completion, Datum, LossInputs, Rollout, RolloutGroup, Task, Turn

__all__ = [
    "made_up_group",
    "needs_old_logprobs",
    "probe_advantages",
    "probe_correction",
    "probe_credit",
    "probe_loss",
    "probe_minibatch",
    "probe_pair_loss",
    "probe_reduction",
]
__all__ += ["reads"]

_LENGTHS = [3, 2]
_OUTPUTS = {  # the model's, for five tokens of two datums; the first token does not train
    "policy_logprobs": [-1.0, -0.52, -2.05, -0.98, -1.5],
    "entropy": [0.5, 1.25, 0.75, 1.0, 0.25],
    "predicted_values": [0.1, 0.4, -0.3, 0.6, 0.2],
    "teacher_kl": [0.6, 0.3, 0.05, 0.7, 0.2],
}
_MASK = [0.0, 1.0, 1.0, 1.0, 1.0]
_COLUMNS = {
    "token_weights": [0.0, 0.3, 0.2, 0.35, 0.15],
    "loss_mask": _MASK,
    "advantages": [0.0, 1.0, 1.0, -0.5, -0.5],
    "sampling_logprobs": [0.0, -0.5, -2.0, -1.0, -1.6],
    "old_logprobs": [0.0, -0.51, -2.02, -0.99, -1.55],
    "old_entropy": [0.0, 1.2, 0.8, 1.1, 0.3],
    "batch_logprobs": [0.0, -0.53, -2.01, -1.02, -1.52],
    "reference_logprobs": [0.0, -0.6, -1.9, -1.2, -1.4],
    "teacher_logprobs": [0.0, -0.4, -2.2, -0.8, -1.3],
    "values": [0.0, 0.3, -0.2, 0.5, 0.1],
    "returns": [0.0, 1.0, 1.0, -0.5, -0.5],
}
_FAR_LOG_RATIO = 20.0
_ROLLOUTS = "rollouts (task.answer=None, text='', every turn with the rollout's reward)"
"""What a function of rollouts is called on, in messages."""
_TOLERANCE = 1e-4  # float32, and a function of the user's own may round more than once


def probe_loss(
    where: str, loss_fn: Callable, loss_config: dict[str, float], *, outputs: Sequence[str], columns: set[str]
) -> None:
    """Refuses a loss that fails, has no gradient by any of the model's `outputs`, trains masked tokens, or is not a
    token sum with `token_weights`. `columns` names the loss inputs that the run's data will have.

    Raises ValueError; the message begins with `where`, the config's field and the function's name.
    """
    once, gradients = _call(where, loss_fn, loss_config, _inputs(columns, outputs), outputs)
    for grad_T in gradients:
        if not torch.isfinite(torch.cat([once[None], grad_T])).all():
            raise ValueError(
                f"{where}: gave loss {once.item()} and gradient {grad_T.tolist()} on a few ordinary "
                "tokens; return a finite one"
            )
        if grad_T[0] != 0:
            raise ValueError(
                f"{where}: has gradient {grad_T[0].item():.3g} where loss_mask and weights are 0; "
                "multiply every token's term by inputs.token_weights"
            )
    twice, gradients_twice = _call(where, loss_fn, loss_config, _inputs(columns, outputs, copies=2), outputs)
    if not (_close(twice, 2 * once) and _close(gradients_twice, gradients.repeat(1, 2))):
        raise ValueError(
            f"{where}: gave {once.item():.6g} for some data and {twice.item():.6g} for the same data twice, which "
            "is no token sum; return (inputs.token_weights * per_token).sum(), the weights hold the mean already"
        )
    heavy, gradients_heavy = _call(where, loss_fn, loss_config, _inputs(columns, outputs, weight=2.0), outputs)
    if not (_close(heavy, 2 * once) and _close(gradients_heavy, 2 * gradients)):
        raise ValueError(
            f"{where}: gave {once.item():.6g}, and {heavy.item():.6g} with doubled weights, so the reduction would not "
            "count as configured; multiply every token's term by inputs.token_weights once"
        )


def reads(column: str, loss_fn: Callable, columns: set[str], outputs: Sequence[str]) -> bool:
    """Whether a policy's loss, with its `loss_config` bound, depends on a column of the data, such as `advantages`."""
    inputs = _inputs(columns, outputs)
    before = loss_fn(inputs)[0]
    inputs.tensors[column] = inputs.tensors[column] * 3.0
    return not _close(loss_fn(inputs)[0], before)


def needs_old_logprobs(correction_fn: Callable, correction_config: dict[str, float], columns: set[str]) -> bool:
    """Whether a correction fails for lack of `old_logprobs`. Another failure is for `probe_correction` to report."""
    try:
        correction_fn(_inputs(columns - {"old_logprobs"}, ["policy_logprobs"]), **correction_config)
    except AttributeError as error:
        return "'old_logprobs'" in str(error)
    except Exception:
        return False
    return False


def probe_correction(
    where: str,
    correction_fn: Callable,
    correction_config: dict[str, float],
    columns: set[str],
    outputs: Sequence[str] = ("policy_logprobs",),
) -> None:
    """Refuses a correction that fails or does not return one finite, non-negative factor per token and metrics."""
    inputs = _inputs(columns, outputs)
    answer = _tried(where, partial(correction_fn, inputs), correction_config)
    if not _is_pair(answer) or answer[0].shape != inputs.loss_mask.shape:
        raise ValueError(f"{where}: returned {_shown(answer)}; return (factor_T, metric sums), one factor per token")
    if not torch.isfinite(answer[0]).all() or (answer[0] < 0).any():
        raise ValueError(f"{where}: gave factors {answer[0].tolist()}; return finite ones that are not negative")


def probe_minibatch(where: str, config: AlgorithmConfig, columns: set[str]) -> None:
    """Refuses a `minibatch_fn` that fails, or does not return the same sequences with every column."""
    parts = {name: torch.tensor(_COLUMNS[name]).split(_LENGTHS) for name in columns}
    data = []
    for index, length in enumerate(_LENGTHS):
        tokens, loss_inputs = torch.arange(length), {name: rows[index] for name, rows in parts.items()}
        data.append(Datum(tokens=tokens, target_tokens=tokens + 1, loss_inputs=loss_inputs, rollout=index))
    same_sequences(data, _tried(where, partial(config.minibatch_fn, data), config.minibatch_config))


def probe_pair_loss(where: str, loss_fn: Callable, loss_config: dict[str, float]) -> None:
    """Refuses a loss of pairs that fails, does not return one finite number per pair, has no finite gradient, or is
    smaller where the rejected completions are the far likelier ones."""
    for chosen, rejected in (([0.5, -1.0, 2.0], [-0.25, 0.75, -0.6]), ([0.0] * 3, [0.0] * 3)):
        numbers = [torch.tensor(row, dtype=torch.float64).requires_grad_() for row in (chosen, rejected)]
        loss_P = _tried(where, partial(loss_fn, *numbers), loss_config)
        if not isinstance(loss_P, torch.Tensor) or loss_P.shape != (3,):
            raise ValueError(f"{where}: returned {_shown(loss_P)} for three pairs; return a tensor (3,), one per pair")
        if not loss_P.requires_grad:
            raise ValueError(f"{where}: its loss has no gradient, so nothing would train; compute it without detach()")
        gradients = torch.autograd.grad(loss_P.sum(), numbers, allow_unused=True)
        chosen_P, rejected_P = (torch.zeros(3) if gradient is None else gradient for gradient in gradients)
        if not torch.isfinite(torch.cat([loss_P.detach(), chosen_P, rejected_P])).all():
            raise ValueError(
                f"{where}: gave losses {loss_P.tolist()} with a gradient of {chosen_P.tolist()} and "
                f"{rejected_P.tolist()} for chosen {chosen} and rejected {rejected}; return finite ones"
            )
    # Far apart: near 0 the gradient of discopop has the other sign, as published.
    far_P = torch.full((3,), _FAR_LOG_RATIO, dtype=torch.float64)
    right, wrong = (_tried(where, partial(loss_fn, a_P, -a_P), loss_config).mean().item() for a_P in (far_P, -far_P))
    if not right < wrong:
        raise ValueError(
            f"{where}: is {right:.3g} where the chosen have {_FAR_LOG_RATIO:g} and the rejected {-_FAR_LOG_RATIO:g}, "
            f"and {wrong:.3g} the other way round, so the rejected would gain; mend its sign, or the order of its "
            "arguments (chosen, rejected)"
        )


def probe_advantages(config: AlgorithmConfig) -> None:
    """Refuses an estimator that fails, or gives anything but one finite number per rollout. Tried on groups with all
    rewards 1, all 0, mixed and graded."""
    size = config.group_size
    graded = [i / size for i in range(size)]
    rewards = [[1.0] * size, [0.0] * size, [float(i % 2) for i in range(size)], graded]
    for role in config.advantage_fn if isinstance(config.advantage_fn, dict) else ["policy"]:
        groups = [made_up_group(f"probe/{i}", rewards_G, config, role=role) for i, rewards_G in enumerate(rewards)]
        estimator = config.advantage_fn[role] if isinstance(config.advantage_fn, dict) else config.advantage_fn
        example = f"groups of made-up {_ROLLOUTS}" if sees_group(estimator) else "made-up rewards of groups"
        try:
            _tried("algorithm.advantage_fn", partial(estimate_advantages, groups, config), {}, example)
        except ValueError as error:
            place = defined_at(estimator)
            raise ValueError(f"{error}{place if '.py:' not in str(error) else ''}") from error


def probe_credit(config: AlgorithmConfig) -> None:
    """Refuses a credit function that fails, or gives anything but one finite number per turn. Tried on a rollout of one
    turn, and on one whose first turn has two branches."""
    for group in (made_up_group("probe/one turn", [1.0], config), made_up_group("probe/branches", [1.0], config)):
        (rollout,) = group.rollouts
        if group.id == "probe/branches":
            root = rollout.turns[0]
            before = [*root.prompt_tokens, *root.completion.tokens]
            rollout.turns += [dataclasses.replace(root, prompt_tokens=[*before, i]) for i in (1, 2)]
        where = f"algorithm.credit_fn={named(config.credit_fn)}"
        _tried(where, partial(credits_of, rollout, config), {}, f"made-up {_ROLLOUTS}")


def made_up_group(name: str, rewards_G: list[float], config: AlgorithmConfig, *, role: str = "policy") -> RolloutGroup:
    """A group of rollouts of one turn and of 1 to 8 sampled tokens, with these rewards, and a baseline where the run
    will play one. Turns have the reward and the seconds that an environment gives them. Each rollout has every reward
    part that is asked for by name, because no task says here what parts its reward has; the value is the reward."""
    task = Task(id="probe", prompt="")
    rollouts = []
    for i, reward in enumerate(rewards_G):
        length = 1 + i % 8
        sampled = Completion(
            tokens=[0] * length, logprobs=[-1.0] * length, policy_versions=[0] * length, finish_reason="stop"
        )
        turns = [Turn(prompt_tokens=[0], completion=sampled, reward=reward, seconds=(0.0, 1.0, 1.0))]
        rollout = Rollout(id=f"{name}/{i}", task=task, turns=turns, reward=reward, group=name, role=role)
        rollout.reward_parts, rollout.seconds = _AnyPart(part=reward), {"play": 1.0, "reward": 1.0}
        rollout.baseline = 0.5 if config.greedy_baseline else None
        rollouts.append(rollout)
    return RolloutGroup(id=name, rollouts=rollouts)


class _AnyPart(dict):
    """Reward parts with a value under any name."""

    def __missing__(self, name: str) -> float:
        return self["part"]


def probe_reduction(where: str, reduction: Callable) -> None:
    """Refuses a reduction that fails, or whose weights have another shape than the masks, are not finite, or are not 0
    at masked tokens."""
    masks = [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0]), torch.tensor([0.0, 0.0])]
    weights = _tried(where, partial(reduction, masks, [0, 0, 1]), {})
    if not isinstance(weights, list) or [getattr(w, "shape", None) for w in weights] != [mask.shape for mask in masks]:
        raise ValueError(
            f"{where}: returned {_shown(weights)} for masks of 3, 1 and 2 tokens; return a list of one "
            "tensor of weights per mask, of its shape"
        )
    for mask_T, weights_T in zip(masks, weights, strict=True):
        if not torch.isfinite(weights_T).all() or (weights_T[mask_T == 0] != 0).any():
            raise ValueError(
                f"{where}: gave weights {weights_T.tolist()} for the mask {mask_T.tolist()}; "
                "return finite ones that are 0 where the mask is"
            )


def _inputs(columns: set[str], outputs: Sequence[str], *, copies: int = 1, weight: float = 1.0) -> LossInputs:
    tensors_by_name = {name: torch.tensor(_OUTPUTS[name] * copies).requires_grad_() for name in outputs}
    if "policy_logprobs" in tensors_by_name:
        tensors_by_name["entropy"] = torch.tensor(_OUTPUTS["entropy"] * copies)
    tensors = {name: torch.tensor(_COLUMNS[name] * copies) for name in columns}
    tensors["token_weights"] = tensors["token_weights"] * weight
    lengths = torch.tensor(_LENGTHS * copies)
    datum_T, turns = torch.repeat_interleave(lengths), [[(0, 1, 2)], [(0, 0, 1), (1, 1, 1)]] * copies
    return LossInputs(**tensors_by_name, datum=datum_T, num_datums=len(lengths), tensors=tensors, turns=turns)


def _call(
    where: str, loss_fn: Callable, loss_config: dict[str, float], inputs: LossInputs, outputs: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradients by the model's outputs, one row per output)."""
    answer = _tried(where, partial(loss_fn, inputs), loss_config)
    if not _is_pair(answer) or answer[0].dim() != 0:
        raise ValueError(
            f"{where}: returned {_shown(answer)}; return (loss, metric sums): a tensor without dimensions, and a dict"
        )
    loss, metrics = answer
    _check_metrics(where, metrics)
    variables = [getattr(inputs, name) for name in outputs]
    gradients = torch.autograd.grad(loss, variables, allow_unused=True) if loss.requires_grad else [None]
    if all(gradient is None for gradient in gradients):
        names = " or ".join(f"inputs.{name}" for name in outputs)
        raise ValueError(
            f"{where}: its loss has no gradient by {names}, so nothing would train; "
            f"compute it from {names} without detach()"
        )
    return loss.detach(), torch.stack(
        [torch.zeros_like(x) if grad is None else grad for x, grad in zip(variables, gradients, strict=True)]
    )


def _check_metrics(where: str, metrics: dict) -> None:
    """Refuses metric sums of a loss that a line of metrics could not hold, or that stand for another number there."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_metric(name):
            raise ValueError(
                f"{where}: returned a metric named {name!r}; name it area/what, such as 'policy/clip_frac'"
            )
        if name in REINFORCEMENT and name != "policy/clip_frac":
            raise ValueError(f"{where}: returned {name!r}, which is a metric of every run; give it another name")
        if not isinstance(value, (int, float)) and getattr(value, "numel", lambda: 0)() != 1:
            raise ValueError(
                f"{where}: returned {_shown(value)} as {name!r}; return its sum over the tokens, one number"
            )


def _tried(where: str, function: Callable, keywords: dict[str, float], example: str = "a few made-up tokens"):
    try:
        return function(**keywords)
    except ValueError as error:  # this package's ValueErrors begin with the argument at fault
        text = str(error)
        if text.partition("=")[0] in keywords:
            raise ValueError(f"{where.partition('=')[0].replace('_fn', '_config')}.{text}") from error
        raise ValueError(text if text.startswith("algorithm.") else f"{where}: {text}") from error
    except Exception as error:
        raise ValueError(
            f"{where}: raised {described(error)} on {example}; mend it, or its arguments{raised_at(error)}"
        ) from error


def _is_pair(answer) -> bool:
    return (
        isinstance(answer, tuple)
        and len(answer) == 2
        and isinstance(answer[0], torch.Tensor)
        and isinstance(answer[1], dict)
    )


def _shown(answer) -> str:
    if isinstance(answer, torch.Tensor):
        return f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of " + (", ".join(map(_shown, answer)) or "nothing")
    return f"a {type(answer).__name__}"


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=_TOLERANCE, atol=1e-6)
