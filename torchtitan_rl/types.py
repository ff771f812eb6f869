"""The data that flows through a run, from a task to an optimizer step.

Shape letters used in this package: T tokens of one sequence or of one packed microbatch, G rollouts of
a group, B batch, L sequence length, V vocabulary, D hidden size, N heads, H head size, K targets or likeliest tokens of
one position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = [
    "Task",
    "SamplingParams",
    "Request",
    "Completion",
    "Turn",
    "Rollout",
    "RolloutGroup",
    "Datum",
    "LossInputs",
    "LossFunction",
    "Microbatch",
    "Accumulated",
    "OptimParams",
    "ForwardBackwardOutput",
    "OptimStepOutput",
]


@dataclass(kw_only=True, slots=True)
class Task:
    """One problem to be attempted.

    Example: `Task(id="sort/train/17", prompt="cab=", answer="abc")`.
    """

    id: str
    """Unique within a run; rollout records refer to it."""
    prompt: str | list[dict[str, str]]
    """Text, or chat messages for the tokenizer's chat template."""
    answer: Any = None
    """Whatever the reward needs to judge a completion; never shown to the policy."""
    demonstration: str | list[str] | None = None
    """A completion to imitate in the supervised phase; a list is played in the task's environment, a turn each."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How one completion is drawn. Example: `SamplingParams(max_tokens=16, temperature=1.0, seed=3)`."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    seed: int | None = None
    """The same seed, prompt and weights give the same tokens; on a GPU only in the same batch, because kernels there
    round by how many tokens they work on."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Generation ends after one of these (it is kept in the completion); the end-of-sequence token is always one."""
    stop: list[str] = field(default_factory=list)
    """Generation ends once the decoded text holds one of these."""
    ignore_eos: bool = False


@dataclass(slots=True)
class Request:
    """One prompt to complete, or with `params=None` to score."""

    tokens: list[int]
    params: SamplingParams | None
    top_k: int = 0
    """Of a prompt to score: how many of the likeliest tokens to score at each position; 0: the prompt's own."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """What a generator returned for one prompt; lists have one entry per sampled token."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution it was sampled from (after temperature)."""
    policy_versions: list[int]
    """The policy version that sampled each token."""
    finish_reason: str
    """`"stop"` (a stop token or string) or `"length"` (the token limit)."""
    filtered: bool = False
    """Sampled with top-k or top-p: from another distribution than the trainer's, so it is refused for training."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(kw_only=True, slots=True)
class Turn:
    """One exchange: the tokens the policy saw and the completion it gave."""

    prompt_tokens: list[int]
    completion: Completion
    reward: float | None = None
    """What this turn earned; the last turn's counts for the rollout where the rollout itself has none."""
    advantages: float | Sequence[float] | None = None
    """Precomputed: one number, or one per sampled token (list, tuple, array, tensor); see algorithm/precomputed.py."""
    advantages_version: int | None = None
    """The policy version `advantages` were computed for; None: the newest that sampled this turn."""
    soft_targets: tuple[torch.Tensor, torch.Tensor] | None = None
    """For each of n sampled tokens, K tokens to learn in its place (n, K) and the weight of each (n, K), such as a
    teacher's probability; a cross-entropy on them is added to the loss."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One attempt at a task. Example: `Rollout(id="0/3/1", task=task, turns=[turn], reward=1.0)`."""

    id: str
    task: Task
    turns: list[Turn]
    reward: float | None = None
    """Of the whole attempt; None: what its last turn earned, see `algorithm.grouping.fill_rewards`."""
    text: str = ""
    """What the policy said, decoded, for records and people; of several turns, observations too."""
    group: str = ""
    """The id of the group that it was rolled out in, which names its draw; a rollout of a hook's own may have none."""
    role: str = "policy"
    """Who the policy played; rollouts of different roles are not compared with each other."""
    masked: bool = False
    """Its reward counts among its siblings', its tokens do not train."""
    end_reason: str = ""
    """What ended a rollout in an environment: `"done"`, or the limit `"turns"`, `"tokens"` or `"time"`."""


@dataclass(kw_only=True, slots=True)
class RolloutGroup:
    """Siblings: rollouts whose rewards are compared with each other, of one task and role unless a hook groups them."""

    id: str
    rollouts: list[Rollout]
    advantages: list[float] | None = None
    """One per rollout once an estimator has run; the mean over its tokens where they were precomputed."""
    precomputed: bool = False
    """Whether `advantages` came with the turns and no estimator has run."""

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


@dataclass(kw_only=True, slots=True)
class Datum:
    """One training sequence: predict `target_tokens[t]` after reading `tokens[:t+1]`.

    Every tensor in `loss_inputs` is float32 with as many rows T as `tokens` has entries: (T,), or (T, n) where a loss
    reads several numbers of a position. Two keys are universal: `weights` (how much a token counts in the token sum the
    loss returns; this is where reductions live) and `loss_mask` (T,) (1 where the policy produced the target). Losses
    of the policy-gradient family also read `advantages` and `sampling_logprobs`.

    Distillation: `target_tokens` may be (T, K), several tokens to score at each position, and `weights` with them; and
    `teacher_hidden` (T, D), a teacher's hidden states, makes the policy compute its KL to that teacher.

    Example::

        Datum(tokens=torch.tensor([5, 9, 7]), target_tokens=torch.tensor([9, 7, 2]),
              loss_inputs={"weights": torch.tensor([0., .5, .5]), "loss_mask": torch.tensor([0., 1., 1.])})

    Raises ValueError when lengths differ, when it is empty, when a tensor of it is not finite, or has another shape.
    """

    tokens: torch.Tensor
    target_tokens: torch.Tensor
    loss_inputs: dict[str, torch.Tensor]
    group: int = 0
    """Which group of the batch it came from: minibatches keep groups whole, and some reductions average over them."""
    rollout: int = 0
    """Which rollout of the batch it came from; one whose turns do not extend each other gives several datums."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0:
            raise ValueError("datum.tokens=[]: a datum needs at least one token; drop it before training")
        for name, tensor in {"target_tokens": self.target_tokens, **self.loss_inputs}.items():
            if len(tensor) != length:
                raise ValueError(
                    f"datum.{name}: has {len(tensor)} entries where tokens has {length}; give one per token"
                )
        for name, tensor in {"target_tokens": self.target_tokens, **self.loss_inputs}.items():
            if tensor.dim() > (1 if name == "loss_mask" else 2) or 0 in tensor.shape:
                raise ValueError(
                    f"datum.{name}: has shape {tuple(tensor.shape)}; give "
                    + ("(T,)" if name == "loss_mask" else "(T,) or (T, n)")
                )
        weights = self.loss_inputs.get("weights", self.target_tokens)
        if weights.dim() == 2 and weights.shape != self.target_tokens.shape:
            raise ValueError(
                f"datum.weights: has shape {tuple(weights.shape)} where target_tokens has "
                f"{tuple(self.target_tokens.shape)}; give one per token, or one per target"
            )
        for name, tensor in self.loss_inputs.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(
                    f"datum.{name}={tensor[~torch.isfinite(tensor)][0].item()}: is not finite; mask such tokens "
                    "out and give them a finite value"
                )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """What a loss function sees of one microbatch; every tensor is (T,) unless it says otherwise. A policy fills the
    first two, a critic the third, distillation from a whole distribution the fourth."""

    policy_logprobs: torch.Tensor | None = None
    """Log-probability of each target under the policy being trained, (T,) or (T, K) as they are; carries gradient."""
    entropy: torch.Tensor | None = None
    """Entropy of the policy's distribution at each token; carries gradient."""
    predicted_values: torch.Tensor | None = None
    """The critic's value of each position: the return it expects from here on; carries gradient."""
    teacher_kl: torch.Tensor | None = None
    """KL(policy || teacher) over the whole vocabulary at each position, at the call's temperature, where the data carry
    `teacher_hidden`; carries gradient."""
    datum: torch.Tensor
    """Which datum (0, 1, ...) of the microbatch each token belongs to."""
    num_datums: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The datums' `loss_inputs`, packed: (T,) or (T, n)."""

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return object.__getattribute__(self, "tensors")[name]
        except KeyError:
            raise AttributeError(
                f"loss input {name!r}: the data carry only {sorted(self.tensors)}; fill it where datums are built"
            ) from None


LossFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`(LossInputs, **loss_config) -> (token sum, metric sums)`."""


@dataclass(kw_only=True, slots=True)
class Microbatch:
    """Datums packed end to end along T. Built by dispatch; `lengths` and the tensors agree."""

    tokens_T: torch.Tensor
    target_tokens_T: torch.Tensor
    """(T,) or (T, K)."""
    lengths: list[int]
    """Tokens of each datum, in packed order."""
    loss_inputs: dict[str, torch.Tensor]
    """Float32, each (T,) or (T, n)."""


@dataclass(kw_only=True, slots=True)
class Accumulated:
    """One rank's share of a `forward_backward` call."""

    rows: dict[str, list[torch.Tensor]]
    """By what they are (`policy_logprobs`, a critic's `predicted_values`, whatever else was asked for): per datum, in
    the order of the microbatches."""
    loss: float
    sums: dict[str, float]
    """Metric sums over tokens; names ending in `_max` are maxima."""
    interval: tuple[float, float] = (0.0, 0.0)
    """When this rank began and ended, in seconds since the epoch."""


@dataclass(kw_only=True, slots=True)
class OptimParams:
    """Optimizer parameters of one step; None keeps what `PolicyTrainer.Config.optimizer` says."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@dataclass(kw_only=True, slots=True)
class ForwardBackwardOutput:
    """What one `forward_backward` call did, in the order of the data it was given."""

    policy_logprobs: list[torch.Tensor]
    """Per datum, float32 (T,) or (T, K) as its targets are: this role's log-probability of every target; empty for a
    critic."""
    values: list[torch.Tensor]
    """Per datum, float32 of length T: a critic's value of every position; empty for other roles."""
    loss: float
    """The weighted token sum over the whole call."""
    num_tokens: int
    """Targets with a non-zero loss mask."""
    metrics: dict[str, float]
    """Means and maxima over those tokens, under the names of `metrics.py`."""
    interval: tuple[float, float]
    """When the first rank began and the last one ended, in seconds since the epoch of the workers' clocks."""
    top_tokens: list[torch.Tensor] = field(default_factory=list)
    """Per datum, int64 (T, top_k): the likeliest tokens at each position, best first; empty unless asked for."""
    top_logprobs: list[torch.Tensor] = field(default_factory=list)
    """Per datum, float32 (T, top_k): their log-probabilities over the whole vocabulary; empty unless asked for."""
    hidden: list[torch.Tensor] = field(default_factory=list)
    """Per datum, (T, D) in the role's compute dtype: the states that enter its head, after the last norm; empty unless
    asked for."""


@dataclass(kw_only=True, slots=True)
class OptimStepOutput:
    """What one `optim_step` did."""

    grad_norm: float
    """L2 norm of the accumulated gradient before clipping."""
    lr: float
    policy_version: int
    """Version after the step: one more than before unless `skipped`."""
    skipped: bool
    """The gradient was not finite: it was dropped and the parameters are unchanged."""
