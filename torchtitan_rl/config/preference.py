"""Config of the preference phase: training on pairs of a better and a worse completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from torchtitan_rl.config.algorithm import ScheduleConfig
from torchtitan_rl.constraints import BETAS, Hint

__all__ = ["PreferenceConfig"]


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """The preference phase: optimizer steps on preference pairs, after the warm start and before the first rollout.
    Example: `PreferenceConfig(num_steps=200, loss_fn=pair_losses.dpo, loss_config={"beta": 0.1})`."""

    num_steps: Annotated[int, Ge(1), Hint("leave preference None for no such phase")] = 100
    """Optimizer steps of the preference phase."""
    task: Any = None
    """Config of the task family whose pairs train; None: `RunConfig.task`."""
    role: Literal["policy", "critic"] = "policy"
    """Who trains. `policy`: by the log-ratios of completions to the reference. `critic`: the model with a value head,
    as a reward model, by its values at the last token."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Pairs of one optimizer step; the loss is a mean over them."""
    loss_fn: Callable | None = None
    """Loss of pairs: a function of two numbers per pair, see algorithm/pair_losses.py. None: `dpo` for the policy,
    `bradley_terry` for a model with a value head."""
    loss_config: dict[str, float] = field(default_factory=dict)
    """Keyword arguments of `loss_fn`, such as `beta`."""
    length_normalized: bool = False
    """True: the log-ratio of a completion is the mean over its tokens; False: their sum."""
    reference_free: bool = False
    """True: log-probabilities in place of log-ratios, so that no reference is needed; False: `roles.reference`."""
    sft_coef: Annotated[float, Ge(0), Hint("use 0 for none")] = 0.0
    """Coefficient of the cross-entropy on chosen completions, a mean over their tokens; 0: none."""
    lr: Annotated[float, Ge(0)] = 1e-6
    """Peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(decay="linear"))
    """Learning rate over the preference phase, relative to the peak `lr`."""
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.95)
    """AdamW's decay rates in the preference phase."""
    eval_pairs: Annotated[int, Ge(0), Hint("use 0 for none")] = 0
    """Pairs of the validation split, the first of it, that are scored after the last step; 0: none."""
