"""What is refused of a preference phase before anything starts."""

from functools import partial

import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.algorithm import pair_losses
from torchtitan_rl.config.algorithm import ScheduleConfig
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.run import RoleConfig, RolesConfig, RunConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.train.start import read_inputs
from torchtitan_rl.validation.functions import probe_pair_loss
from torchtitan_rl.validation.run import advice, validate


def config(roles=("reference",), **preference) -> RunConfig:
    made = run_config()
    made.task = LetterSort.Config(pairs=True)
    made.preference = PreferenceConfig(**preference)
    made.roles = RolesConfig(**{role: RoleConfig() for role in roles})
    return made


def test_what_is_meant_is_accepted():
    validate(config())
    validate(config(loss_fn=pair_losses.ipo, length_normalized=True, sft_coef=0.5))
    validate(config((), reference_free=True, loss_config={"margin": 0.5}))
    validate(config(("critic",), role="critic", loss_config={"margin": 0.5}))
    validate(config(("critic",), role="critic", loss_fn=pair_losses.dpo))
    apply_overrides(made := config(), ["--preference.loss-config.beta", "0.5", "--preference.num-steps", "7"])
    assert made.preference.loss_config == {"beta": 0.5} and made.preference.num_steps == 7


@pytest.mark.parametrize(
    ("roles", "preference", "expected"),
    [
        ((), {}, "preference: there is no reference to take log-ratios to; set roles.reference, or"),
        (("reference",), {"role": "critic"}, "preference.role='critic': this run has no such role; set roles.critic"),
        (("critic",), {"role": "critic", "sft_coef": 1.0}, "preference.sft_coef=1.0: is about log-probabilities"),
        (("critic",), {"role": "critic", "reference_free": True}, "preference.reference_free=True: is about"),
        (("critic",), {"role": "critic", "length_normalized": True}, "preference.length_normalized=True: is about"),
        (("reference",), {"role": "teacher"}, "preference.role='teacher'"),
        (("reference",), {"num_steps": 0}, "preference.num_steps=0: "),
        (("reference",), {"batch_size": 0}, "preference.batch_size=0: "),
        (("reference",), {"sft_coef": -1.0}, "preference.sft_coef=-1.0: "),
        (("reference",), {"loss_config": {"beta": 0.0}}, "preference.loss_config.beta=0.0: must be positive"),
        (("reference",), {"loss_config": {"beta": -1.0}}, "preference.loss_config.beta=-1.0: must be positive"),
        (
            ("reference",),
            {"loss_config": {"label_smoothing": 0.5}},
            "preference.loss_config.label_smoothing=0.5: is the probability of a flipped label",
        ),
        (
            ("reference",),
            {"loss_fn": pair_losses.exo, "loss_config": {"label_smoothing": 0}},
            "preference.loss_config.label_smoothing=0: the KL to certain labels",
        ),
        (
            ("reference",),
            {"loss_config": {"betta": 0.1}},
            "preference.loss_config.betta=0.1: torchtitan_rl.algorithm.pair_losses:dpo has no such argument; did you "
            "mean beta?",
        ),
        (
            ("reference",),
            {"schedule": ScheduleConfig(warmup_steps=3, warmup_ratio=0.1)},
            "preference.schedule.warmup_ratio=0.1: warmup_steps=3 says",
        ),
    ],
)
def test_what_cannot_be_is_refused(roles, preference, expected):
    assert refusal(validate, config(roles, **preference)).startswith(expected)


def test_a_loss_given_by_name_is_refused():
    made = config()
    made.preference.loss_fn = "dpo"
    assert refusal(validate, made).startswith("preference.loss_fn=")


def swapped(chosen_P, rejected_P):
    return pair_losses.dpo(rejected_P, chosen_P)


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (swapped, "so the rejected would gain; mend its sign"),
        (lambda chosen_P, rejected_P: (chosen_P - rejected_P).mean(), "for three pairs; return a tensor (3,)"),
        (lambda chosen_P, rejected_P: (rejected_P - chosen_P).detach(), "has no gradient"),
        (lambda chosen_P, rejected_P: -(chosen_P - rejected_P).sqrt(), "return finite ones"),
        (lambda chosen_P: chosen_P, "raised TypeError"),
    ],
    ids=["swapped", "mean", "detached", "root", "arguments"],
)
def test_a_loss_of_ones_own_that_cannot_train_is_refused(loss_fn, expected):
    message = refusal(validate, config(loss_fn=loss_fn))
    assert message.startswith("preference.loss_fn=") and expected in message


PAIR_LOSSES = {
    name: getattr(pair_losses, name)
    for name in pair_losses.__all__
    if name not in ("scored", "forward_kl", "jensen_shannon", "alpha_divergence", "loss_of")  # parts of losses
} | {
    f"scored by {score.__name__}": partial(pair_losses.scored, score=score)
    for score in (pair_losses.forward_kl, pair_losses.jensen_shannon, pair_losses.alpha_divergence)
}


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_loss_of_the_library_passes_and_with_its_arguments_exchanged_it_is_refused(name):
    loss_fn = PAIR_LOSSES[name]
    probe_pair_loss("preference.loss_fn", loss_fn, {})
    message = refusal(lambda: probe_pair_loss("preference.loss_fn", lambda c_P, r_P: loss_fn(r_P, c_P), {}))
    assert "so the rejected would gain; mend its sign" in message


def test_tasks_without_pairs_are_refused_before_the_start():
    made = config()
    read_inputs(made)
    made.preference.task = LetterSort.Config()
    message = refusal(read_inputs, made)
    assert "letter_sort/train/" in message and "has no chosen completion; leave preference=None" in message
    made.preference.task, made.task = made.task, LetterSort.Config()
    assert read_inputs(made).preference_family is not read_inputs(made).family


def test_a_rate_that_destroys_is_advised_against():
    assert [line for line in advice(config(lr=0.1)) if line.startswith("preference.lr=0.1: AdamW at this rate")]
    assert not [line for line in advice(config(lr=1e-6)) if line.startswith("preference.lr")]
