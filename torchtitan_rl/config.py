"""A run's configuration: one dataclass tree, one file per run, overrides from the shell.

A config file needs `import torchtitan_rl.config as rl` for every config class but its task family's.
Loading, showing and validating (`validation.py`) a config imports neither vLLM nor Monarch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import cloudpickle

from torchtitan_rl.actors.config import AdamWConfig, GeneratorConfig, LoRAConfig, TrainerConfig, WeightSyncConfig
from torchtitan_rl.algorithm.config import AlgorithmConfig, DistillConfig, SupervisedConfig
from torchtitan_rl.algorithm.filters import FilterConfig
from torchtitan_rl.algorithm.schedules import ScheduleConfig
from torchtitan_rl.model.config import ExpertsShape, ModelConfig, Qwen3Shape, missing_weights

__all__ = [
    "RunConfig",
    "ControllerConfig",
    "EvalSetConfig",
    "SamplingConfig",
    "RoleConfig",
    "RolesConfig",
    "ModelConfig",
    "Qwen3Shape",
    "ExpertsShape",
    "SupervisedConfig",
    "AlgorithmConfig",
    "DistillConfig",
    "FilterConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "AdamWConfig",
    "LoRAConfig",
    "GeneratorConfig",
    "WeightSyncConfig",
    "COLOCATION",
    "load_config",
    "apply_overrides",
    "resolved",
    "flat",
    "function_name",
]


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
    split: Literal["train", "validation", "test"] = "validation"
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

    def missing_weights(self) -> str:
        """Why a run cannot start although its config is valid; empty when it can."""
        return next(
            filter(
                None,
                (
                    missing_weights(model, "model" if role == "policy" else f"roles.{role}.model")
                    for role, (_, model) in self.trainers().items()
                ),
            ),
            "",
        )


def load_config(path: str) -> RunConfig:
    """The config of a file. Raises ValueError when there is no such file or it does not define one."""
    file = Path(path)
    if not file.is_file():
        near = (
            difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], 1)
            if file.parent.is_dir()
            else []
        )
        raise ValueError(
            f"config={path!r}: there is no such file"
            + (
                f"; did you mean {file.parent / near[0]}?"
                if near
                else "; give the path of a Python file with a config() function"
            )
        )
    module_name = f"torchtitan_rl_config_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None:
        raise ValueError(f"config={path!r}: is not a Python file; give a .py file with a config() function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"config={path!r}: importing it raised {_one_line(error)}; mend the file") from error
    if not callable(getattr(module, "config", None)):
        raise ValueError(f"config={path!r}: defines no config(); add `def config() -> RunConfig:`")
    try:
        config = module.config()
    except Exception as error:
        raise ValueError(f"config={path!r}: config() raised {_one_line(error)}; mend the file") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"config={path!r}: config() returned a {type(config).__name__}; return a RunConfig")
    cloudpickle.register_pickle_by_value(module)  # functions of this file travel to actors by value
    return config


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def apply_overrides(config: RunConfig, arguments: list[str]) -> None:
    """Sets existing fields from `--field.path value` (or `=value`), parsed by tyro as the field's type.

    Raises ValueError for a field that does not exist (with the nearest name) or a value of the wrong type.
    """
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)  # its value is every word up to the next flag: --betas 0.9 0.99
        if not flag.startswith("--"):
            raise ValueError(f"argument={flag!r}: is not an override; write --field.path value")
        path, equals, value = flag[2:].partition("=")
        if not equals:
            words = []
            while remaining and not remaining[0].startswith("--"):
                words.append(remaining.pop(0))
            if not words:
                raise ValueError(f"{flag}: has no value; write {flag} VALUE")
            value = " ".join(words)
        _set(config, path, value)


def _set(config: RunConfig, shown: str, text: str) -> None:
    *parents, last = shown.replace("-", "_").split(".")
    target: Any = config
    for depth, name in enumerate(parents, start=1):
        _require_field(config, target, name, shown, text)
        target = target[name] if isinstance(target, dict) else getattr(target, name)
        if target is None:
            raise ValueError(
                f"--{shown}={text}: {'.'.join(parents[:depth])} is None in this config, and overrides add "
                "nothing; set it in the config file"
            )
    _require_field(config, target, last, shown, text)
    held = target[last] if isinstance(target, dict) else getattr(target, last)
    if dataclasses.is_dataclass(held):
        example = next(path for path, _ in flat(held)).replace("_", "-")
        raise ValueError(f"--{shown}={text}: is a section; set one of its fields, such as --{shown}.{example}")
    value = _parse(_fields(target)[last], shown, text)
    if isinstance(target, dict):
        target[last] = value
    else:
        setattr(target, last, value)


def _require_field(config: RunConfig, target: Any, name: str, shown: str, text: str) -> None:
    if name in _fields(target):
        return
    every = [path for path, _ in flat(config)]
    wanted = shown.replace("-", "_")
    same_leaf = [path for path in every if path.rsplit(".", 1)[-1] == wanted.rsplit(".", 1)[-1]]
    near = [path for path in same_leaf if "." not in wanted or path.startswith(wanted.split(".", 1)[0] + ".")]
    near = near or difflib.get_close_matches(wanted, every, 1) or same_leaf
    hint = (
        f"; did you mean --{near[0].replace('_', '-')}?" if near else "; `torchtitan-rl show CONFIG` lists all fields"
    )
    raise ValueError(f"--{shown}={text}: there is no such field{hint}")


def _fields(target: Any) -> dict[str, Any]:
    """Settable names of a config object and their types."""
    if isinstance(target, dict):
        return {name: float if type(value) is int else type(value) for name, value in target.items()}
    if not dataclasses.is_dataclass(target):
        return {}
    hints = get_type_hints(type(target))
    return {f.name: hints[f.name] for f in dataclasses.fields(target) if not f.name.startswith("_")}


def _parse(kind: Any, shown: str, text: str) -> Any:
    import tyro

    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(errors):
            words = text.split() if _takes_several(kind) else [text]
            if kind is bool:
                words = [text.capitalize()]
            return tyro.cli(tyro.conf.Positional[kind], args=["--", *words] if text.startswith("-") else words)
    except (SystemExit, Exception):
        name = getattr(kind, "__name__", None) if not hasattr(kind, "__args__") else str(kind).replace("typing.", "")
        raise ValueError(f"--{shown}={text}: is not of type {name or kind}; give a value of that type") from None


def _takes_several(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) in (tuple, list)


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf, in the order of definition."""
    items = (
        config.items()
        if isinstance(config, dict)
        else ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config) if not f.name.startswith("_"))
    )
    for name, value in items:
        path = f"{prefix}{name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type) or isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def function_name(function: Callable) -> str:
    """`module:qualname`, partial arguments included."""
    if isinstance(function, functools.partial):
        arguments = ", ".join([*map(repr, function.args), *(f"{k}={v!r}" for k, v in function.keywords.items())])
        return f"{function_name(function.func)}({arguments})"
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def resolved(config: RunConfig) -> dict[str, Any]:
    """The config as plain data for the run directory: functions become their name and a hash of their source."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            entries = {
                f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.name.startswith("_")
            }
            return {"class": f"{type(value).__module__}:{type(value).__qualname__}", **entries}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if callable(value):
            function = value.func if isinstance(value, functools.partial) else value
            try:
                source = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
            except (OSError, TypeError):
                source = ""
            return {"function": function_name(value), "source_sha256": source}
        return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)

    return plain(config)
