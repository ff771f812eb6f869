"""The data that flows through a run, from a task to a loss.

Shape letters of this package: T tokens of one sequence or of one packed microbatch, G rollouts of a group, B batch,
L sequence length, V vocabulary, D hidden size, N heads, H head size, K targets or likeliest tokens of one position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_rl import html
from torchtitan_rl.types.routing import Routing
from torchtitan_rl.types.turns import Turns, missing

__all__ = ["Task", "Completion", "Turn", "Rollout", "RolloutGroup", "Datum", "LossInputs", "LossFunction"]


@dataclass(kw_only=True, slots=True)
class Task:
    """One problem to attempt.

    Example: `Task(id="sort/train/17", prompt="cab=", answer="abc")`.
    """

    id: str
    """Unique within a run; rollout records refer to tasks by id."""
    prompt: str | list[dict[str, str]]
    """Text, or chat messages for the tokenizer's chat template."""
    answer: Any = None
    """The reward's reference for judging a completion; the policy never sees the answer."""
    demonstration: str | list[str] | None = None
    """A completion to imitate in the supervised phase; a list has one completion per turn in the task's environment."""
    chosen: str | None = None
    """The better completion of the task's preference pair, for the preference phase; None: the task has no pair."""
    rejected: str | None = None
    """The worse completion of the pair; another text than `chosen`."""

    def __post_init__(self) -> None:
        """Raises ValueError for an `id` that is no text: tables hold it as text and could not be read again."""
        if not isinstance(self.id, str):
            raise ValueError(f"task.id={self.id!r}: is no text; give each task a text of its own, such as id='17'")


@dataclass(kw_only=True, slots=True)
class Completion:
    """The tokens that a generator sampled after one prompt; lists have one entry per sampled token."""

    tokens: list[int]
    logprobs: list[float]
    """Sampling log-probability of each token: under the sampling distribution, after temperature."""
    policy_versions: list[int]
    """The policy version that sampled each token; `WITHOUT_ADAPTERS` (-1): the base did."""
    finish_reason: str
    """`"stop"` (a stop token or string) or `"length"` (the token limit)."""
    seed: int | None = None
    """The stream that drew the tokens, `SamplingParams.seed`; None: the request named none."""
    filtered: str = ""
    """The settings (`SamplingParams.altered`) that altered the policy's distribution, or that the base sampled:
    training refuses such tokens."""
    routed_experts: torch.Tensor | None = None
    """(tokens, layers, K), see `Routing.experts`: of the prompt and of every sampled token but the last, which nothing
    has read. None: the generator does not record them (`generator.record_routing`)."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(kw_only=True, slots=True)
class Turn:
    """One prompt with its completion."""

    prompt_tokens: list[int]
    completion: Completion
    reward: float | None = None
    """The turn's reward; the last turn's reward stands in for a missing rollout reward."""
    advantages: float | Sequence[float] | None = None
    """Precomputed advantages, one number or one per sampled token (any sequence); see algorithm/precomputed.py."""
    advantages_version: int | None = None
    """The policy version of the precomputed advantages; None: the newest version that sampled a token of the turn."""
    soft_targets: tuple[torch.Tensor, torch.Tensor] | None = None
    """For each of n sampled tokens, K alternative tokens (n, K) and the weight of each alternative (n, K), such as a
    teacher's probability. The loss gets a cross-entropy on the alternatives."""
    seconds: tuple[float, float, float] | None = None
    """Seconds since the rollout began, for records: the completion was asked for, it had come, and the environment had
    answered. None: not known."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One attempt at a task. Example: `Rollout(id="0/3/1", task=task, turns=[turn], reward=1.0)`."""

    id: str
    task: Task
    turns: list[Turn]
    reward: float | None = None
    """Reward of the whole attempt; None takes the last turn's reward, see `algorithm.grouping.fill_rewards`."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Numbers that the reward was made from, by name: for curves and records. Only an estimator that asks for them
    trains on them, such as `algorithm.group_estimators.gdpo`."""
    baseline: float | None = None
    """Reward of a greedy rollout of the same task and role; None: none was played (`algorithm.greedy_baseline`)."""
    text: str = ""
    """What the family's reward judges, and what records show: the decoded completions; with several turns, the
    observations too. A workflow of one's own sets it, unless it gives rewards."""
    group: str = ""
    """Id of the rollout's group, which names the draw; may be empty for a rollout that a hook made."""
    role: str = "policy"
    """The role that the policy played; rollouts of different roles are not compared with each other."""
    masked: bool = False
    """The reward of a masked rollout counts among the group's rewards, but the rollout's tokens do not train."""
    end_reason: str = ""
    """Why a rollout in an environment ended: `"done"`, or the limit `"turns"`, `"tokens"` or `"time"`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by what was waited for: `play`, the workflow with its sampling and environment; `reward`."""
    counts: dict[str, float] = field(default_factory=dict)
    """Numbers about the attempt by name, such as `drift`; each has a curve (`rollout/drift_mean`)."""


@dataclass(kw_only=True, slots=True)
class RolloutGroup:
    """Rollouts whose rewards are compared with each other: of one task and role, unless a grouping hook decides."""

    id: str
    rollouts: list[Rollout]
    advantages: list[float] | None = None
    """One advantage per rollout, from an estimator; the mean over a rollout's tokens for precomputed advantages."""
    precomputed: bool = False
    """Whether `advantages` are the turns' precomputed advantages, not an estimator's."""
    left_out: str = ""
    """The filter that left the group out of training, `"zero_variance"` or `"overlong"`; empty: the group trains."""

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

    def _repr_html_(self) -> str:
        return html.group(self)


@dataclass(kw_only=True, slots=True)
class Datum:
    """One training sequence: predict `target_tokens[t]` after reading `tokens[:t+1]`.

    Every tensor in `loss_inputs` is float32 with as many rows T as `tokens` has entries: (T,), or (T, n) where a loss
    reads several numbers of a position. Two keys are universal: `token_weights` (how much a token counts in the token
    sum that a loss returns; a reduction writes them) and `loss_mask` (T,) (1 where the policy sampled the target).
    Losses of the policy-gradient family also read `advantages` and `sampling_logprobs`.

    Distillation: `target_tokens` may be (T, K), several tokens to score at each position; `token_weights` may then be
    (T, K).
    `teacher_hidden` (T, D), a teacher's hidden states, makes the policy compute the KL to the teacher.

    Example::

        Datum(tokens=torch.tensor([5, 9, 7]), target_tokens=torch.tensor([9, 7, 2]),
              loss_inputs={"token_weights": torch.tensor([0., .5, .5]), "loss_mask": torch.tensor([0., 1., 1.])})

    Raises ValueError for tensors of different lengths, for no tokens, and for a tensor that is not finite or has
    another shape.
    """

    tokens: torch.Tensor
    target_tokens: torch.Tensor
    loss_inputs: dict[str, torch.Tensor]
    group: int = 0
    """Index of the datum's group in the batch: minibatches keep groups whole, some reductions average over groups."""
    rollout: int = 0
    """Index of the datum's rollout in the batch; a rollout whose turns do not extend each other has several datums."""
    turns: Turns | None = None
    """Where the datum's turns are; None: not known, and no loss can read `position` or `turn`."""
    routing: Routing | None = None
    """The generator's experts of each of `tokens`; None: not known, and the trainer's routers choose."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0:
            raise ValueError("datum.tokens=[]: a datum needs at least one token; drop it before training")
        for name, tensor in {"target_tokens": self.target_tokens, **self.loss_inputs}.items():
            if len(tensor) != length:
                raise ValueError(
                    f"datum.{name}: has {len(tensor)} entries where tokens has {length}; give one per token"
                )
            allowed = ["(T,)"] if name == "loss_mask" else ["(T,)", "(T, n)"]
            if tensor.dim() > len(allowed) or 0 in tensor.shape:
                raise ValueError(f"datum.{name}: has shape {tuple(tensor.shape)}; give {' or '.join(allowed)}")
        weights = self.loss_inputs.get("token_weights", self.target_tokens)
        if weights.dim() == 2 and weights.shape != self.target_tokens.shape:
            raise ValueError(
                f"datum.token_weights: has shape {tuple(weights.shape)} where target_tokens has "
                f"{tuple(self.target_tokens.shape)}; give one per token, or one per target"
            )
        for name, tensor in self.loss_inputs.items():
            # A finite sum has finite terms and is the cheaper question; finite terms may still overflow their sum.
            if not (abs(tensor.sum().item()) < torch.inf or torch.isfinite(tensor).all()):
                raise ValueError(
                    f"datum.{name}={tensor[~torch.isfinite(tensor)][0].item()}: is not finite; mask such tokens "
                    "out and give them a finite value"
                )
        if self.tokens.dim() != 1:
            raise ValueError(f"datum.tokens: has shape {tuple(self.tokens.shape)}; give (T,)")
        if self.routing is not None:
            self.routing.check(length)

    def __len__(self) -> int:
        return len(self.tokens)

    def _repr_html_(self) -> str:
        return html.datum(self)


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """A loss function's view of one microbatch; a tensor is (T,) unless the field says otherwise. A policy fills
    `policy_logprobs` and `entropy`, a critic `predicted_values`, distillation from whole distributions `teacher_kl`."""

    policy_logprobs: torch.Tensor | None = None
    """Log-probability of each target under the policy, (T,) or (T, K) in the targets' shape; carries gradient."""
    entropy: torch.Tensor | None = None
    """Entropy of the policy's distribution at each token; carries gradient."""
    predicted_values: torch.Tensor | None = None
    """The critic's value of each position, the expected return from the position on; carries gradient."""
    teacher_kl: torch.Tensor | None = None
    """KL(policy || teacher) over the whole vocabulary at each position, at the call's temperature; for data with
    `teacher_hidden`; carries gradient."""
    datum: torch.Tensor
    """Index (0, 1, ...) in the microbatch of each token's datum."""
    num_datums: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The datums' `loss_inputs`, packed: (T,) or (T, n)."""
    turns: list[Turns | None] = field(default_factory=list)
    """Of each datum. When a loss reads `position` or `turn`, both int64 (T,), they are computed from `turns`: the index
    of each token in its completion, and of its turn in the rollout; -1 where the policy did not sample."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return object.__getattribute__(self, "tensors")[name]
        except KeyError:
            return missing(self, name)


LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`(LossInputs, **loss_config) -> (token sum, metric sums)`."""
