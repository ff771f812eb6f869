"""The pages for those who come from verl, TRL or SkyRL: the settings they name exist, their examples are accepted."""

import ast
import dataclasses
import inspect
import re
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from torchtitan_rl.algorithm import (
    advantages,
    corrections,
    group_estimators,
    losses,
    minibatch_statistics,
    pair_losses,
    reductions,
)
from torchtitan_rl.config.algorithm import EntropyControlConfig
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.resolve import flat
from torchtitan_rl.config.run import RewardModelConfig, RoleConfig, RolesConfig, RunConfig
from torchtitan_rl.validation.run import validate

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("from_verl", "from_trl", "from_skyrl")
FUNCTIONS = {
    name: getattr(module, name)
    for module in (advantages, group_estimators, losses, reductions, corrections, minibatch_statistics, pair_losses)
    for name in module.__all__
    if callable(getattr(module, name))
}

ACTOR, ROLLOUT, ALGORITHM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "trainer.algorithm."
SAME = {  # value in their example: where ours has it, as it is
    "from_verl": {
        "data.train_batch_size": "algorithm.tasks_per_step",
        ROLLOUT + "n": "algorithm.group_size",
        ACTOR + "ppo_mini_batch_size": "algorithm.tasks_per_minibatch",
        ACTOR + "ppo_epochs": "algorithm.num_epochs",
        "data.max_prompt_length": "sampling.max_prompt_tokens",
        "data.max_response_length": "sampling.max_tokens",
        ACTOR + "clip_ratio_low": "algorithm.loss_config.clip_low",
        ACTOR + "clip_ratio_high": "algorithm.loss_config.clip_high",
        ACTOR + "clip_ratio_c": "algorithm.loss_config.dual_clip",
        ACTOR + "kl_loss_coef": "algorithm.kl_coef",
        ACTOR + "ppo_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
        ACTOR + "optim.lr": "trainer.optimizer.lr",
        ACTOR + "optim.weight_decay": "trainer.optimizer.weight_decay",
        ROLLOUT + "temperature": "algorithm.temperature",
        ROLLOUT + "max_model_len": "generator.max_model_len",
        ROLLOUT + "tensor_model_parallel_size": "generator.tensor_parallel_degree",
    },
    "from_trl": {
        "num_generations": "algorithm.group_size",
        "max_completion_length": "sampling.max_tokens",
        "temperature": "algorithm.temperature",
        "beta": "algorithm.kl_coef",
        "num_iterations": "algorithm.num_epochs",
        "epsilon": "algorithm.loss_config.clip_low",
        "epsilon_high": "algorithm.loss_config.clip_high",
        "learning_rate": "trainer.optimizer.lr",
        "warmup_steps": "algorithm.schedule.warmup_steps",
        "max_steps": "controller.num_steps",
        "eval_steps": "controller.eval_every",
        "seed": "seed",
        "vllm_max_model_length": "generator.max_model_len",
        "vllm_importance_sampling_clip_max": "algorithm.correction_config.high",
    },
    "from_skyrl": {
        "trainer.train_batch_size": "algorithm.tasks_per_step",
        "generator.n_samples_per_prompt": "algorithm.group_size",
        "trainer.policy_mini_batch_size": "algorithm.tasks_per_minibatch",
        "trainer.update_epochs_per_batch": "algorithm.num_epochs",
        "trainer.max_tokens_per_microbatch": "trainer.max_tokens_per_microbatch",
        "trainer.max_prompt_length": "sampling.max_prompt_tokens",
        "generator.sampling_params.max_generate_length": "sampling.max_tokens",
        "generator.sampling_params.temperature": "algorithm.temperature",
        ALGORITHM + "eps_clip_low": "algorithm.loss_config.clip_low",
        ALGORITHM + "eps_clip_high": "algorithm.loss_config.clip_high",
        ALGORITHM + "kl_loss_coef": "algorithm.kl_coef",
        ALGORITHM + "off_policy_correction.token_tis_ratio_clip_high": "algorithm.correction_config.cap",
        "trainer.policy.optimizer_config.lr": "trainer.optimizer.lr",
        "trainer.policy.optimizer_config.num_warmup_steps": "algorithm.schedule.warmup_steps",
        "generator.inference_engine.num_engines": "generator.num_replicas",
        "generator.inference_engine.engine_init_kwargs.max_model_len": "generator.max_model_len",
        "trainer.eval_interval": "controller.eval_every",
        "trainer.seed": "seed",
    },
}


def page(name):
    return (DOCS / f"{name}.md").read_text()


def example(name):
    """(what they write, as text; our RunConfig) of a page's example of both."""
    theirs, ours = re.findall(r"```(?:python|bash)(?: check)?\n(.*?)```", page(name), re.DOTALL)[-2:]
    scope = {}
    exec(ours, scope)
    return theirs, scope["config"]()


def ours_in_tables(name):
    """Backticked text in the second column of the page's tables of three columns, without those that say `none`."""
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in page(name).splitlines() if line.startswith("| ")]
    return [text for row in rows if len(row) == 3 for text in re.findall(r"`([^`]+)`", row[1])]


def paths():
    """Every field of a RunConfig that has all roles and adapters: dotted path to its declared type."""
    _, config = example("from_verl")
    config.roles = RolesConfig(
        **{
            role: RoleConfig(trainer=config.trainer.of_role(), model=config.model)
            for role in ("reference", "critic", "teacher")
        },
        reward_model=RewardModelConfig(trainer=config.trainer.of_role(), model=config.model),
    )
    config.trainer.lora, config.preference = LoRAConfig(), PreferenceConfig()
    config.algorithm.entropy_control = EntropyControlConfig()
    known = {}
    for path, _ in flat(config):
        target, names = config, path.split(".")
        for depth, field in enumerate(names, start=1):
            if not dataclasses.is_dataclass(target):  # a dict's entries: arguments of a function
                break
            known[".".join(names[:depth])] = get_type_hints(type(target))[field]
            target = getattr(target, field)
    return known


def problem(text, known):
    """What is wrong with a setting of a table, `path`, `path["argument"]` or either with `=value`; "" if nothing."""
    path, argument, value = re.fullmatch(r'([\w.]+)(?:\["(\w+)"\])?(?:=(.+))?', text, re.DOTALL).groups()
    if path not in known:
        return f"{path}: there is no such field"
    if argument is not None:
        functions = {
            "algorithm.loss_config": losses,
            "algorithm.critic_loss_config": losses,
            "algorithm.correction_config": corrections,
            "algorithm.minibatch_config": minibatch_statistics,
            "preference.loss_config": pair_losses,
        }.get(path)
        if functions is None or not any(
            argument in inspect.signature(FUNCTIONS[name]).parameters for name in functions.__all__ if name in FUNCTIONS
        ):
            return f"{path}: no function takes {argument}"
    if value is not None:
        try:
            given = eval(value, {"partial": partial, **FUNCTIONS})
        except NameError as error:
            return f"{path}: {error}"
        if get_origin(known[path]) is Literal and given not in get_args(known[path]):
            return f"{path}: {given!r} is not one of {get_args(known[path])}"
    return ""


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_in_a_table_exists(name):
    named, known = ours_in_tables(name), paths()
    assert len(named) > 50
    assert [problem(text, known) for text in named if problem(text, known)] == []


def test_a_setting_that_does_not_exist_is_found():
    known = paths()
    for text in (
        'algorithm.loss_config["clip_hi"]',
        "algorithm.loss_fn=ppoo",
        'algorithm.kl_in="rewards"',
        "algorithm.clip_low",
        "roles.referee",
        'algorithm.group_size["clip_low"]',
    ):
        assert problem(text, known), text
    for text in (
        'algorithm.loss_config["clip_high"]',
        "roles.critic.trainer.optimizer.lr",
        "trainer.lora.rank",
        "algorithm.reduction=partial(constant_length, length=512)",
        'algorithm.kl_in="reward"',
        "seed",
    ):
        assert not problem(text, known), text


@pytest.mark.parametrize("name", PAGES)
def test_the_example_is_accepted(name):
    _, config = example(name)
    assert isinstance(config, RunConfig)
    validate(config)


@pytest.mark.parametrize("name", PAGES)
def test_both_sides_of_the_example_say_the_same(name):
    theirs, config = example(name)
    given = dict(re.findall(r"([\w.]+)=([^\s,)]+)", theirs))
    values = dict(flat(config))
    differ = {
        key: (given.get(key), values.get(path))
        for key, path in SAME[name].items()
        if ast.literal_eval(given[key]) != values[path]
    }
    assert not differ


def test_batches_and_steps_of_the_examples_are_converted():
    """Steps there are batches in verl and SkyRL; batches there are completions per device in TRL."""
    per_batch = {}
    for name, steps, evaluation in (
        ("from_verl", "trainer.total_training_steps", "trainer.test_freq"),
        ("from_skyrl", "trainer.max_training_steps", "trainer.eval_interval"),
    ):
        theirs, config = example(name)
        given = dict(re.findall(r"([\w.]+)=([^\s,)]+)", theirs))
        per_batch[name] = config.algorithm.steps_per_batch
        assert config.controller.num_steps == int(given[steps]) * per_batch[name]
        assert config.controller.eval_every == int(given[evaluation]) * per_batch[name]
    assert per_batch == {"from_verl": 2, "from_skyrl": 1}
    theirs, config = example("from_verl")
    assert config.algorithm.schedule.warmup_steps == 2 * int(re.search(r"lr_warmup_steps=(\d+)", theirs)[1])
    theirs, config = example("from_trl")
    sizes = [
        int(re.search(rf"{key}=(\d+)", theirs)[1])
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    ]
    assert config.algorithm.tasks_per_step == sizes[0] * sizes[1] / sizes[2]
    assert config.algorithm.steps_per_batch == 1
