"""A run as one dataclass tree: the loop, sampling, roles, and the sections of the other files in this folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from torchtitan_rl.config.algorithm import AlgorithmConfig, SupervisedConfig
from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig, WeightSyncConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.record import RecordConfig
from torchtitan_rl.config.sampling import AlteredSampling
from torchtitan_rl.config.stopping import StopConfig
from torchtitan_rl.constraints import Check, Hint
from torchtitan_rl.types.completions import DistributionSettings

__all__ = [
    "RunConfig",
    "ControllerConfig",
    "EvalSetConfig",
    "SamplingConfig",
    "RewardModelConfig",
    "RoleConfig",
    "RolesConfig",
    "Split",
    "COLOCATION",
]

Split = Literal["train", "validation", "test"]

COLOCATION = {
    "none": (),
    "policy_reference": ("policy", "reference"),
    "all": ("policy", "reference", "critic", "teacher", "reward_model", "generator"),
}
"""The roles that share devices, by the value of `roles.colocation`."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig(DistributionSettings):
    """How rollouts and evaluations are generated. What alters the distribution is refused here, with the reason, since
    it would hold for rollouts that train; `controller.eval_sampling` is for evaluations."""

    max_prompt_tokens: Annotated[int, Ge(1)] = 512
    """Longest first prompt of a rollout, in tokens; a longer prompt is an error."""
    max_tokens: Annotated[int, Ge(1)] = 512
    """Longest completion, in tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a completion, besides the tokenizer's end-of-sequence token."""
    stop: Annotated[list[str], Check(all, "an empty text ends every completion at once; leave it out")] = field(
        default_factory=list
    )
    """Texts that end a completion; the text stays part of the completion."""
    max_turns: Annotated[int, Ge(1)] = 8
    """Most completions of a rollout in an environment."""
    max_rollout_tokens: Annotated[int, Ge(0), Hint("use 0 for max_prompt_tokens + max_tokens")] = 0
    """Longest rollout in an environment, in tokens: first prompt, completions and observations. 0: max_prompt_tokens +
    max_tokens."""
    rollout_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 600.0
    """Seconds after which a rollout in an environment ends with the turns played so far."""


@dataclass(kw_only=True, slots=True)
class EvalSetConfig:
    """One more evaluation: on another task family, or on a split of the run's own family."""

    task: Any = None
    """Config of the task family; None: `RunConfig.task`."""
    split: Split = "validation"
    """Split that the tasks come from."""
    num_tasks: Annotated[int, Ge(1)] = 256
    """Number of tasks, the first of the split; a smaller split is used whole."""
    num_samples: Annotated[int, Ge(0), Hint("use 0 for the greedy completion only")] = 0
    """Samples per task for avg@n, besides the greedy completion; 0: the greedy completion only."""
    pass_at_k: Annotated[int, Ge(0), Hint("use 0 for no pass@k")] = 0
    """k of pass@k, the chance that at least one of k samples is correct, estimated from `num_samples` samples; 0: no
    pass@k."""
    temperature: float = 1.0
    """Temperature of the `num_samples` samples."""
    correct_reward: Annotated[float | None, Check(math.isfinite, "is not finite; give a number, or None")] = None
    """Smallest reward of a completion that counts as correct; None: `controller.correct_reward`."""
    sampling: AlteredSampling | None = None
    """Top-p, top-k, min-p and penalties of this evaluation; None: `controller.eval_sampling`."""


def _keeps_one(keep_last: int) -> bool:
    return keep_last == -1 or keep_last >= 1


@dataclass(kw_only=True, slots=True)
class ControllerConfig:
    """The loop: number of steps, evaluations, and deadlines."""

    num_steps: Annotated[int, Ge(0), Hint("use 0 for no reinforcement")] = 100
    """Optimizer steps of the reinforcement phase; 0: no reinforcement."""
    eval_every: Annotated[int, Ge(0), Hint("use 0 to evaluate only before and after reinforcement")] = 20
    """Optimizer steps between evaluations on validation tasks; 0: evaluate only before and after reinforcement."""
    eval_tasks: Annotated[int, Ge(1)] = 256
    """Validation tasks per evaluation, each with a greedy completion."""
    test_tasks: Annotated[int, Ge(1)] = 512
    """Test tasks of the one evaluation at the end of the run, each with a greedy completion."""
    pass_at_k: Annotated[int, Ge(0), Hint("use 0 for no pass@k")] = 8
    """Samples per validation task for the pass@k that is reported after the warm start; 0: no pass@k."""
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    """Further evaluations by name, each made whenever the run evaluates on validation tasks."""
    eval_sampling: AlteredSampling = field(default_factory=AlteredSampling)
    """Top-p, top-k, min-p and penalties of evaluations; rollouts that train have none."""
    stop: StopConfig = field(default_factory=StopConfig)
    """Rules that end the run before `num_steps`; all are off by default."""
    correct_reward: Annotated[float, Check(math.isfinite, "is not finite; give a number")] = 1.0
    """Smallest reward of a completion that counts as correct in accuracies."""
    max_skipped_steps: Annotated[int, Ge(1), Hint("use 1 to stop at the first one")] = 3
    """Consecutive optimizer steps with a gradient or a loss that is not finite at which the run stops with an error."""
    checkpoint_every: Annotated[int, Ge(0), Hint("use 0 for one checkpoint, at the end")] = 0
    """Optimizer steps between checkpoints, in the supervised phase too; 0: one checkpoint, at the end."""
    keep_last: Annotated[
        int, Check(_keeps_one, "would delete the checkpoint to resume from; use 1 or more, or -1 to keep all")
    ] = 3
    """Newest checkpoints that are kept; -1: all."""
    keep_every: Annotated[int, Ge(0), Hint("use 0 to switch it off")] = 0
    """The first checkpoint at or after each multiple of so many reinforcement steps is kept too; 0: none."""
    keep_best: str = ""
    """Name of an evaluation (`validation`, or one of `eval_sets`) whose best checkpoint is kept too; empty: none."""
    checkpoint_export: Literal["last", "all", "none"] = "last"
    """Which checkpoints also hold the weights as a Hugging Face directory. `torchtitan-rl export` makes one later."""
    record_tokens: bool = True
    """Whether rollout records hold turns, tokens and both sides' log-probabilities: some 100 bytes a token until the
    next checkpoint turns the records into Parquet. False keeps texts, rewards and counts."""
    max_hours: Annotated[float, Ge(0), Hint("use 0 for no limit")] = 0.0
    """Hours after which the run writes a checkpoint and ends with exit status 75, to be resumed; 0: no limit."""
    hang_timeout_s: Annotated[float, Ge(1)] = 300.0
    """Seconds without a sign of life of the controller after which `--max-restarts` kills the controller and
    begins another attempt."""
    start_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 300.0
    """Seconds that actors may take to load their model."""
    call_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 600.0
    """Seconds that one training call may take."""
    sample_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 600.0
    """Seconds that may pass without an answer to any of the requests that a replica was sent together."""
    check_reward: bool = True
    """Whether the reward judges two made-up completions before a run starts; `--no-reward-check` sets False."""
    reward_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 30.0
    """Seconds that the rewards of one group, or one answer of an environment, may take."""

    @property
    def evaluation_names(self) -> list[str]:
        """The evaluations between steps, in their order: on the run's own validation tasks, then `eval_sets`."""
        return ["validation", *self.eval_sets]


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """A model beside the policy, on a mesh of its own."""

    trainer: TrainerConfig | None = None
    """Layout and microbatches of the role's mesh; for a critic, the optimizer too. None: the policy's, no adapters."""
    model: ModelConfig | None = None
    """Model of the role; None: the policy's model, with its weights as reinforcement starts, or the preference phase. A
    reward model's `checkpoint` and a teacher need their own."""


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    """A frozen sequence classifier with one label, whose score of a rollout is a part of the rollout's reward:
    `weight` x score + `task_weight` x the task's own reward. Its weights are `model`, a Hugging Face directory with
    `score.weight`, or `checkpoint`."""

    trainer: TrainerConfig | None = None
    """Layout and microbatches of the role's mesh. None: the policy's, no adapters."""
    model: ModelConfig | None = None
    """The classifier; with `checkpoint` its sizes, None being the policy's."""
    checkpoint: str = ""
    """A critic's part of a run's checkpoint, such as `runs/x/checkpoints/step-100/critic`, or another checkpoint of a
    model with a value head. Empty: the weights are those of `model`."""
    weight: Annotated[float, Check(math.isfinite, "is not finite; give a number")] = 1.0
    """Factor of the score; 0: the score is measured only."""
    task_weight: Annotated[float, Check(math.isfinite, "is not finite; give a number")] = 1.0
    """Factor of the task's own reward; 0: that reward is measured only. Evaluations count the task's own reward."""


@dataclass(kw_only=True, slots=True)
class RolesConfig:
    """Roles beside the policy, and the roles that share devices. None: the run has no such role."""

    reference: RoleConfig | None = None
    """A frozen model that the KL is measured against (`policy/reference_kl`): the policy as reinforcement starts, or
    another `model`."""
    critic: RoleConfig | None = None
    """A model with a value head; its values give per-token advantages by GAE."""
    teacher: RoleConfig | None = None
    """Another model (`model` must be set) to learn from, with the policy's vocabulary; see `algorithm.distill`."""
    reward_model: RewardModelConfig | None = None
    """A frozen classifier that scores finished rollouts; see docs/rewards.md."""
    refresh_reference_every: Annotated[int, Ge(0), Hint("use 0 for never")] = 0
    """Optimizer steps after which the reference takes over the policy's weights; 0: never."""
    colocation: Literal["none", "policy_reference", "all"] = "none"
    """Which roles share the policy's devices and take turns on them. `none`: no role. `policy_reference`: the
    reference. `all`: every role, generators included."""

    def share_with(self, role: str) -> str | None:
        """The role whose devices `role` shares; None: `role` has devices of its own."""
        return "policy" if role != "policy" and role in COLOCATION[self.colocation] else None

    def configured(self) -> dict[str, RoleConfig | RewardModelConfig]:
        """The roles beside the policy that this run has, by name."""
        roles: dict[str, RoleConfig | RewardModelConfig | None] = {
            "reference": self.reference,
            "critic": self.critic,
            "teacher": self.teacher,
            "reward_model": self.reward_model,
        }
        return {name: role for name, role in roles.items() if role is not None}


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """The config of a run. A config file has a function `config()` that returns a `RunConfig`."""

    name: str
    """First part of the run directory's name."""
    task: Any
    """Config of the task family, such as `LetterSort.Config()`: data, environment and reward."""
    model: ModelConfig
    """The policy's model."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    preference: PreferenceConfig | None = None
    """The preference phase, such as DPO on pairs; None: the run has none."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The policy's trainer."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    seed: Annotated[int, Interval(ge=0, lt=2**63), Hint("use 0, 1, 2, ...")] = 0
    """Seed of the initial weights, of the order of tasks and of every sampling stream."""
    output_dir: str = ""
    """The run directory; empty: runs/NAME-DATE-TIME."""

    def trainers(self) -> dict[str, tuple[TrainerConfig, ModelConfig]]:
        """Trainer and model configs of every role but the generator, by name; the policy first."""
        roles = self.roles.configured().items()
        by_role = {name: (role.trainer or self.trainer.of_role(), role.model or self.model) for name, role in roles}
        return {"policy": (self.trainer, self.model), **by_role}
