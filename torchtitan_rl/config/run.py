"""A run as one dataclass tree: loop, sampling, roles, and the parts that other files describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_rl.config.actors import GeneratorConfig, TrainerConfig, WeightSyncConfig
from torchtitan_rl.config.algorithm import AlgorithmConfig, SupervisedConfig
from torchtitan_rl.config.model import ModelConfig

__all__ = [
    "RunConfig",
    "ControllerConfig",
    "EvalSetConfig",
    "SamplingConfig",
    "RoleConfig",
    "RolesConfig",
    "Split",
    "COLOCATION",
]

Split = Literal["train", "validation", "test"]

COLOCATION = {
    "none": (),
    "policy_reference": ("policy", "reference"),
    "all": ("policy", "reference", "critic", "teacher", "generator"),
}
"""The roles that share devices, by the name of the setting."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How rollouts and evaluations are generated."""

    max_prompt_tokens: int = 512
    """A longer prompt is an error."""
    max_tokens: int = 512
    """Longest completion."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Besides the tokenizer's end-of-sequence token."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion; they stay part of it."""
    max_turns: int = 8
    """Most completions of a rollout. Of task families with environments only, as are the next two."""
    max_rollout_tokens: int = 0
    """Longest rollout: first prompt, completions and observations. 0: max_prompt_tokens + max_tokens."""
    rollout_timeout_s: float = 600.0
    """A rollout that has not ended by then ends with the turns it has."""


@dataclass(kw_only=True, slots=True)
class EvalSetConfig:
    """Tasks of another family, or of another part of the run's own, that the policy is evaluated on as well."""

    task: Any = None
    """A task family's Config; None: the run's own task."""
    split: Split = "validation"
    num_tasks: int = 256
    """The first so many of the split."""
    num_samples: int = 0
    """Samples per task for avg@n, besides the greedy one; 0 leaves them out."""
    pass_at_k: int = 0
    """Report the chance that one of k samples is correct, estimated from num_samples of them; 0 leaves it out."""
    temperature: float = 1.0
    """Of those samples."""


@dataclass(kw_only=True, slots=True)
class ControllerConfig:
    """The loop: how long, how often it evaluates, and how long it waits for anything."""

    num_steps: int = 100
    """Optimizer steps of the reinforcement phase."""
    eval_every: int = 20
    """Steps between validations; 0 validates only before and after the phase."""
    eval_tasks: int = 256
    """Validation tasks per evaluation (greedy)."""
    test_tasks: int = 512
    """Test tasks, looked at once, at the end."""
    pass_at_k: int = 8
    """Samples per validation task for the pass@k reported after the warm start; 0 leaves it out."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """More evaluations by name, made whenever validation is."""
    correct_reward: float = 1.0
    """A completion counts as correct in accuracies when its reward is at least this."""
    max_skipped_steps: int = 3
    """Consecutive optimizer steps skipped for a non-finite gradient before the run stops with an error."""
    start_timeout_s: float = 300.0
    """For actors to load their model."""
    call_timeout_s: float = 600.0
    """For one training call."""
    sample_timeout_s: float = 600.0
    """For one batch of completions."""
    reward_timeout_s: float = 30.0
    """For the rewards of one group, or one answer of an environment."""


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """A model beside the policy, on a mesh of its own."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Its layout and microbatches; for a critic, its optimizer too."""
    model: ModelConfig | None = None
    """Which model; None: the policy's own, with the same initial weights."""


@dataclass(kw_only=True, slots=True)
class RolesConfig:
    """Models beside the policy, and who shares devices with whom."""

    reference: RoleConfig | None = None
    """The policy as reinforcement starts, frozen or refreshed now and then (or another `model`); `policy/reference_kl`
    says how far the policy is from it."""
    critic: RoleConfig | None = None
    """The same model family with a value head; with one, advantages come from GAE."""
    teacher: RoleConfig | None = None
    """Another model to learn from, with the policy's vocabulary."""
    refresh_reference_every: int = 0
    """Steps after which the reference takes over the policy's weights; 0: never."""
    colocation: Literal["none", "policy_reference", "all"] = "none"
    """Which roles share the policy's devices and take turns on them: nobody, the reference, or every role and the
    generators too."""

    def share_with(self, role: str) -> str | None:
        """The role whose devices `role` is given; None: devices of its own."""
        return "policy" if role != "policy" and role in COLOCATION[self.colocation] else None

    def configured(self) -> dict[str, RoleConfig]:
        """Those that are there, by name."""
        given = {"reference": self.reference, "critic": self.critic, "teacher": self.teacher}
        return {name: role for name, role in given.items() if role is not None}


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything a run is. A config file has one function `config()` that returns one."""

    name: str
    """Names the run directory."""
    task: Any
    """A task family's Config, such as `LetterSort.Config()`: data, environment and reward."""
    model: ModelConfig
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The policy's."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    seed: int = 0
    """Of the initial weights, the order of tasks and every sampling stream."""
    output_dir: str = ""
    """The run directory; empty makes runs/NAME-DATE-TIME."""

    def trainers(self) -> dict[str, tuple[TrainerConfig, ModelConfig]]:
        """Layout and model of every role that is a trainer mesh, by name; the policy first."""
        others = {name: (role.trainer, role.model or self.model) for name, role in self.roles.configured().items()}
        return {"policy": (self.trainer, self.model), **others}
