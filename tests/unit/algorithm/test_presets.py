"""Presets: each is its algorithm and is accepted; what changes a preset, and what is refused."""

from functools import partial
from pathlib import Path

import pytest
import torch

from torchtitan_rl.algorithm import advantages, corrections, group_estimators, losses, presets, reductions
from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig, FilterConfig
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig, RolesConfig
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.self_distill import self_distill
from torchtitan_rl.validation.run import validate

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.py"


def hint(rollout):
    return rollout.task.prompt


PRESETS = {  # name: (config, role that the run brings)
    "asynchronous": (presets.asynchronous(), ""),
    "grpo": (presets.grpo(), ""),
    "dapo": (presets.dapo(), ""),
    "dr_grpo": (presets.dr_grpo(length=12), ""),
    "gspo": (presets.gspo(), ""),
    "cispo": (presets.cispo(), ""),
    "dppo": (presets.dppo(), ""),
    "vespo": (presets.vespo(), ""),
    "sapo": (presets.sapo(), ""),
    "gmpo": (presets.gmpo(), ""),
    "gdpo": (presets.gdpo(), ""),
    "opo": (presets.opo(), ""),
    "pass_at_k": (presets.pass_at_k(k=4), ""),
    "remax": (presets.remax(), ""),
    "rloo": (presets.rloo(), ""),
    "ppo": (presets.ppo(), "critic"),
    "reinforce_pp": (presets.reinforce_pp(kl_coef=0.01), "reference"),
    "reinforce_pp_baseline": (presets.reinforce_pp_baseline(), ""),
    "distill": (presets.distill(), "teacher"),
    "self_distill": (presets.self_distill(workflow=self_distill(single_turn, prompt=hint)), ""),
}


def test_every_preset_is_here():
    assert sorted(PRESETS) == presets.__all__


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_accepted_on_the_quickstarts_task(name):
    config = load_config(str(QUICKSTART))
    config.algorithm, role = PRESETS[name]
    if role:
        config.roles = RolesConfig(**{role: RoleConfig(model=ModelConfig(shape=config.model.shape))})
    validate(config)


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "loss_config", "reduction"),
    [
        ("grpo", advantages.grpo, losses.ppo, {"clip_low": 0.2, "clip_high": 0.2}, reductions.sequence_mean),
        ("dapo", advantages.grpo, losses.ppo, {"clip_low": 0.2, "clip_high": 0.28}, reductions.token_mean),
        ("gspo", advantages.grpo, losses.gspo, {"clip_low": 3e-4, "clip_high": 4e-4}, reductions.sequence_mean),
        ("cispo", advantages.grpo, losses.cispo, {"clip_low": 1.0, "clip_high": 4.0}, reductions.token_mean),
        ("gdpo", group_estimators.gdpo, losses.ppo, {"clip_low": 0.2, "clip_high": 0.2}, reductions.sequence_mean),
        ("reinforce_pp", advantages.reinforce, losses.ppo, {"clip_low": 0.2, "clip_high": 0.2}, reductions.token_mean),
        ("opo", group_estimators.opo, losses.importance_sampling, {}, reductions.token_mean),
        (
            "dppo",
            advantages.group_centered,
            losses.dppo_tv,
            {"delta_low": 0.2, "delta_high": 0.2},
            reductions.token_mean,
        ),
        (
            "vespo",
            advantages.grpo,
            losses.vespo,
            {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
            reductions.token_mean,
        ),
        ("sapo", advantages.grpo, losses.sapo, {"tau_pos": 1.0, "tau_neg": 1.05}, reductions.sequence_mean),
        ("gmpo", advantages.grpo, losses.gmpo, {"log_clip_low": 0.4, "log_clip_high": 0.4}, reductions.sequence_mean),
        (
            "reinforce_pp_baseline",
            advantages.reinforce_pp_baseline,
            losses.ppo,
            {"clip_low": 0.2, "clip_high": 0.2},
            reductions.token_mean,
        ),
    ],
)
def test_the_functions_of_a_preset(name, advantage, loss, loss_config, reduction):
    config, _ = PRESETS[name]
    assert (config.advantage_fn, config.loss_fn, config.reduction) == (advantage, loss, reduction)
    assert config.loss_config == loss_config


def test_constant_lengths():
    """Tokens of sequences count alike whatever the length: 1 / (2 sequences x 12) and 1 / 2."""
    masks = [torch.ones(3), torch.ones(6)]
    assert [w.unique().tolist() for w in presets.dr_grpo(length=12).reduction(masks, [0, 0])] == [
        [pytest.approx(1 / 24)],
        [pytest.approx(1 / 24)],
    ]
    assert [w.unique().tolist() for w in presets.rloo().reduction(masks, [0, 0])] == [[0.5], [0.5]]


def test_reinforce_pp_is_accepted_without_a_reference_and_with_siblings():
    config = load_config(str(QUICKSTART))
    config.algorithm = presets.reinforce_pp()
    assert (config.algorithm.kl_in, config.algorithm.kl_in_return, config.algorithm.group_size) == ("return", False, 1)
    validate(config)
    config.algorithm = presets.reinforce_pp(group_size=4)
    validate(config)


def test_pass_at_k_has_its_k():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    for k in (2, 3):
        of_preset = presets.pass_at_k(k=k).advantage_fn(rewards)
        assert of_preset.tolist() == advantages.pass_at_k(rewards, k=k).tolist()
    assert presets.pass_at_k(k=2).loss_config == {"clip_low": 0.2, "clip_high": 0.28}


def test_a_change_sets_a_field():
    config = presets.grpo(group_size=16, reduction=reductions.token_mean, advantage_fn={"solver": advantages.rloo})
    assert (config.group_size, config.reduction) == (16, reductions.token_mean)
    assert config.advantage_fn == {"solver": advantages.rloo}


def test_dictionaries_of_arguments_are_merged():
    assert presets.dapo(loss_config={"clip_high": 0.3, "dual_clip": 3.0}).loss_config == {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": 3.0,
    }
    assert presets.dapo().loss_config == {"clip_low": 0.2, "clip_high": 0.28}


def test_a_dictionary_sets_fields_of_a_section_and_an_object_replaces_it():
    filters = presets.dapo(filters={"overlong_buffer": 4}).filters
    assert (filters.overlong_buffer, filters.overlong, filters.zero_variance) == (4, "penalty", True)
    assert presets.dapo(filters=FilterConfig()).filters == FilterConfig()
    assert presets.dapo().filters.overlong_buffer == 0


def test_another_function_does_not_get_the_arguments_of_the_one_it_replaces():
    assert presets.grpo(loss_fn=losses.importance_sampling).loss_config == {}
    assert presets.grpo(loss_fn=losses.dro, loss_config={"beta": 0.1}).loss_config == {"beta": 0.1}
    assert presets.grpo(loss_fn=losses.ppo).loss_config == {"clip_low": 0.2, "clip_high": 0.2}
    corrected = presets.grpo(correction_fn=corrections.truncated_token, correction_config={"cap": 3.0})
    assert corrected.correction_config == {"cap": 3.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groupsize": 8}, "presets.grpo(groupsize=8): AlgorithmConfig has no such field; did you mean group_size?"),
        (
            {"filters": {"overlong_bufer": 4}},
            "presets.grpo(filters.overlong_bufer=4): FilterConfig has no such field; did you mean overlong_buffer?",
        ),
        (
            {"schedule": {"zzz": 1}},
            "presets.grpo(schedule.zzz=1): ScheduleConfig has no such field; it has decay, warmup_steps, "
            "warmup_ratio, final_factor",
        ),
        (
            {"distill": {"coef": 0.5}},
            "presets.grpo(distill={'coef': 0.5}): the preset has no distill to change; give an object of its class",
        ),
    ],
)
def test_a_change_that_cannot_be_made_is_refused(changes, message):
    with pytest.raises(ValueError) as caught:
        presets.grpo(**changes)
    assert str(caught.value) == message


def test_a_section_that_a_preset_does_not_have_is_given_as_an_object():
    assert presets.grpo(distill=DistillConfig(coef=0.5)).distill.coef == 0.5


def test_a_preset_with_every_field_given_is_the_plain_config():
    spelled_out = AlgorithmConfig(
        advantage_fn=partial(advantages.grpo, std="unbiased"),
        loss_fn=losses.ppo,
        loss_config={"clip_low": 0.2, "clip_high": 0.28},
        reduction=reductions.token_mean,
        tasks_per_step=32,
    )
    preset = presets.grpo(
        advantage_fn=spelled_out.advantage_fn,
        loss_config={"clip_high": 0.28},
        reduction=reductions.token_mean,
        tasks_per_step=32,
    )
    assert preset == spelled_out
