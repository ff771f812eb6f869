"""Constraints beside fields: what is refused, in which words, and that every number of a config has bounds."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, get_args, get_origin

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Le

import torchtitan_rl.config as rl
from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from tests.unit.families.shapes import SHAPES
from torchtitan_rl.config.record import ProfileConfig
from torchtitan_rl.config.values import field_types
from torchtitan_rl.constraints import Check, Hint, complaint
from torchtitan_rl.families import BUILT_IN, ExpertsShape
from torchtitan_rl.families.rope import Llama3Scaling, YarnScaling
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.validation.fields import check_fields
from torchtitan_rl.validation.run import validate


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (-1, Annotated[int, Ge(0)], "must not be negative; use 0 or more"),
        (-1, Annotated[int, Ge(0), Hint("use 0 for none")], "must not be negative; use 0 for none"),
        (0, Annotated[int, Ge(1)], "must be at least 1"),
        (0.0, Annotated[float, Gt(0)], "must be positive"),
        (3, Annotated[int, Le(2)], "must be at most 2"),
        (1.5, Annotated[float, Interval(ge=0, le=1)], "must be between 0 and 1"),
        (0.0, Annotated[float, Interval(gt=0, le=1)], "must be above 0 and at most 1"),
        (1.0, Annotated[float, Interval(ge=0, lt=1)], "must be at least 0 and below 1"),
        (math.inf, Annotated[float, Ge(0), Hint("use 0")], "must be finite and not negative; use 0"),
        (math.nan, Annotated[float, Gt(0)], "must be finite and positive"),
        (math.nan, Annotated[float, Interval(ge=0, le=1)], "must be between 0 and 1"),
        ("", Annotated[str, Check(bool, "is empty; give a name")], "is empty; give a name"),
        (10**400, Annotated[int, Ge(0)], ""),
        (np.float64(0.5), Annotated[float, Interval(ge=0, le=1)], ""),
        (None, Annotated[int | None, Ge(0)], ""),
        (-1, int, ""),
    ],
)
def test_a_value_is_refused_in_words(value, kind, message):
    assert complaint(value, kind) == message


def test_the_first_mistake_in_the_order_of_the_config_is_reported():
    config = run_config()
    config.seed, config.controller.eval_tasks, config.algorithm.num_epochs, config.trainer.optimizer.lr = -1, 0, 0, "1"
    for message, path, good in (
        ("algorithm.num_epochs=0: must be at least 1", "algorithm.num_epochs", 1),
        ("controller.eval_tasks=0: must be at least 1", "controller.eval_tasks", 1),
        ("trainer.optimizer.lr='1': is of type str, the field takes float", "trainer.optimizer.lr", 1e-3),
        ("seed=-1: must be at least 0", "seed", 0),
    ):
        assert refusal(validate, config).startswith(message)
        rl.apply_overrides(config, [f"--{path}={good}"])
    validate(config)


def test_a_field_of_an_evaluation_set_of_a_role_and_of_torchtitan_has_its_whole_path():
    config = run_config()
    config.controller.eval_sets = {"hard": rl.EvalSetConfig(sampling=rl.AlteredSampling(top_p=2.0))}
    assert refusal(validate, config).startswith("controller.eval_sets.hard.sampling.top_p=2.0: must be above 0 and at")
    config.controller.eval_sets = {"hard": rl.EvalSetConfig(correct_reward=math.inf)}
    message = "controller.eval_sets.hard.correct_reward=inf: is not finite; give a number, or None"
    assert refusal(validate, config) == message
    config.controller.eval_sets = {}
    config.roles.critic = rl.RoleConfig(trainer=rl.TrainerConfig(max_tokens_per_microbatch=-1))
    message = (
        "roles.critic.trainer.max_tokens_per_microbatch=-1: must not be negative; use 0 for the device's own number"
    )
    assert refusal(validate, config) == message
    config.roles.critic = rl.RoleConfig(trainer=rl.TrainerConfig(lora=rl.LoRAConfig(target_modules=["k_proj"])))
    assert refusal(validate, config).startswith("roles.critic.trainer.lora.target_modules='k_proj': query, key and")
    config.roles.critic = rl.RoleConfig(trainer=rl.TrainerConfig())
    config.roles.critic.trainer.parallelism = dataclasses.replace(
        config.trainer.parallelism, data_parallel_shard_degree=-1
    )  # torchtitan's own default
    message = "roles.critic.trainer.parallelism.data_parallel_shard_degree=-1: must be at least 1"
    assert refusal(validate, config) == message


@dataclass
class Rows:
    max_rows: Annotated[int, Interval(ge=1, le=1000), Hint("use 100")] = 100
    weights: dict[str, float] = field(default_factory=dict)

    def build(self): ...


def test_a_task_of_ones_own_may_have_constraints():
    config = run_config()
    config.task = Rows(max_rows=0)
    assert refusal(check_fields, config) == "task.max_rows=0: must be between 1 and 1000; use 100"
    rl.apply_overrides(config, ["--task.max-rows", "7"])
    assert config.task.max_rows == 7
    check_fields(config)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (rl.WandbConfig, {"project": "a/b"}, "project='a/b': is no name; use letters, digits, - and _"),
        (rl.WandbConfig, {"project": ""}, "project='': is no name; use letters, digits, - and _"),
        (rl.ControllerConfig, {"correct_reward": math.nan}, "correct_reward=nan: is not finite; give a number"),
        (rl.ControllerConfig, {"call_timeout_s": 0.0}, "call_timeout_s=0.0: must be positive; use seconds"),
        (rl.GeneratorConfig, {"num_spares": -1}, "num_spares=-1: must not be negative; use 0 or more"),
        (
            rl.AlgorithmConfig,
            {"max_policy_lag": -1},
            "max_policy_lag=-1: must not be negative; use 0 for none, 1 to overlap generation and training",
        ),
        (ExpertsShape, {"num_experts": 0, "top_k": 1}, "num_experts=0: must be at least 1"),
        (
            ExpertsShape,
            {"num_experts": 4, "top_k": 1, "load_balance_coeff": 0.0},
            "load_balance_coeff=0.0: must be positive; use None for no bias",
        ),
        (
            rl.AdamWConfig,
            {"betas": (0.9, 1.0)},
            "betas=(0.9, 1.0): must be two numbers from 0 to below 1; AdamW's usual ones are (0.9, 0.999)",
        ),
        (partial(dataclasses.replace, SHAPES["llama3"]), {"rope_theta": 1.0}, "rope_theta=1.0: must be above 1"),
        (YarnScaling, {"factor": 0.0, "original_max_seq_len": 32}, "factor=0.0: must be positive"),
    ],
)
def test_a_section_by_itself(section, settings, message):
    assert refusal(check_fields, section(**settings)) == message


def test_the_sizes_of_a_model_have_constraints_in_a_config_and_in_a_directory(tmp_path):
    config = run_config()
    shape = config.model.shape
    write_model_dir(tmp_path, shape, assets_dir(config.model), eos=1, pad=0)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 0}))
    for model in (
        dataclasses.replace(config.model, shape=dataclasses.replace(shape, n_layers=0)),
        rl.ModelConfig(assets=str(tmp_path)),
    ):
        config.model = model
        assert refusal(validate, config) == "model.shape.n_layers=0: must be at least 1"
    (tmp_path / "config.json").write_text(json.dumps(content | {"vocab_size": "64"}))
    assert refusal(validate, config).startswith("model.shape.vocab_size='64': ")


CLASSES = [
    *(rl.RunConfig, rl.RoleConfig, rl.RolesConfig, rl.LoRAConfig, rl.DistillConfig, rl.EvalSetConfig),
    *(rl.AlgorithmConfig, rl.FilterConfig, rl.ScheduleConfig, rl.SupervisedConfig, rl.ControllerConfig),
    *(rl.StopConfig, rl.SamplingConfig, rl.AdamWConfig, rl.TrainerConfig, rl.GeneratorConfig, rl.WandbConfig),
    *(rl.RecordConfig, ProfileConfig, rl.PreferenceConfig),
    *(*BUILT_IN, ExpertsShape, YarnScaling, Llama3Scaling),
]
BY_OTHER_FIELDS = {
    (rl.GeneratorConfig, "max_num_batched_tokens"),
    (rl.GeneratorConfig, "kv_cache_gib"),
    (rl.EvalSetConfig, "temperature"),
}
"""Numbers whose bounds depend on other fields; see `validation.generator` and `validation.controller`."""


@pytest.mark.parametrize("section", CLASSES)
def test_every_number_of_a_config_has_constraints(section):
    for name, kind in field_types(section, constraints=True).items():
        plain = field_types(section)[name]
        if {int, float} & {plain, *get_args(plain)} and get_origin(plain) not in (tuple, list, dict):
            assert get_origin(kind) is Annotated or (section, name) in BY_OTHER_FIELDS, name


def test_every_section_is_among_the_classes_above():
    def sections(config):
        for part in (getattr(config, f.name) for f in dataclasses.fields(config)):
            if dataclasses.is_dataclass(part):
                yield type(part)
                yield from sections(part)

    ours = {section for section in sections(run_config()) if section.__module__.startswith("torchtitan_rl.config.")}
    assert ours - {rl.ModelConfig, rl.AlteredSampling, rl.WeightSyncConfig} <= set(CLASSES)
