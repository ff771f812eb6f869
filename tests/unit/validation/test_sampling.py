"""Top-p and its kin: refused for rollouts that train, and where they would have no effect."""

import dataclasses

import pytest

from tests.kit.refusal import refusal
from tests.kit.run_config import run_config
from torchtitan_rl.cli import main
from torchtitan_rl.config.run import EvalSetConfig
from torchtitan_rl.config.sampling import AlteredSampling
from torchtitan_rl.types import SamplingParams
from torchtitan_rl.types.completions import NEUTRAL
from torchtitan_rl.validation.run import validate


def test_for_training_they_are_refused_with_the_reason():
    config = run_config()
    config.sampling.top_p = 0.9
    assert refusal(validate, config) == (
        "sampling.top_p=0.9: rollouts that train are drawn from the policy's own distribution, or the "
        "log-probabilities that the loss compares would not be those of the policy; leave it out, or set "
        "controller.eval_sampling.top_p for evaluations"
    )


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1: must not be negative; use 0 to keep every token"),
        ({"min_p": 1.5}, "min_p=1.5: must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be positive; use 1"),
        ({"presence_penalty": 3.0}, "presence_penalty=3.0: must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan: must be between -2 and 2"),
    ],
)
def test_values_out_of_range_are_refused(settings, complaint):
    config = run_config()
    config.controller.eval_sampling = AlteredSampling(**settings)
    assert refusal(validate, config).startswith(f"controller.eval_sampling.{complaint}")


def test_what_acts_on_samples_needs_samples():
    config = run_config()
    config.controller.eval_sampling.top_k, config.controller.pass_at_k = 20, 0
    assert "controller.eval_sampling.top_k=20: acts on samples only" in refusal(validate, config)
    config.controller.eval_sets = {"own": EvalSetConfig(num_samples=2, sampling=AlteredSampling(top_p=0.5))}
    assert "controller.eval_sampling.top_k=20" in refusal(validate, config)  # the set has settings of its own
    config.controller.eval_sets = {"sampled": EvalSetConfig(num_samples=2)}
    validate(config)
    config.controller.eval_sets["greedy"] = EvalSetConfig(sampling=AlteredSampling(min_p=0.1))
    assert refusal(validate, config).endswith("set controller.eval_sets.greedy.num_samples")
    config.controller.eval_sets["greedy"].sampling = AlteredSampling(repetition_penalty=1.1)
    validate(config)  # a penalty changes a greedy completion too


def test_every_place_has_the_same_settings_with_the_same_values_for_off():
    settings = {f.name: f.default for f in dataclasses.fields(AlteredSampling)}
    assert settings == {name: off[0] for name, off in NEUTRAL.items()}
    params = SamplingParams(max_tokens=1)
    assert settings == {name: getattr(params, name) for name in NEUTRAL}
    args = main._parser("sample").parse_args(["sample", "--checkpoint", "x", "--prompt", "y"])
    assert settings == {name: getattr(args, name) for name in NEUTRAL}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--top-p", "2", "--temperature", "1"], "error: --top-p=2.0: must be above 0 and at most 1"),
        (["--min-p", "0.1"], "error: --min-p=0.1: acts on samples only, a greedy completion takes the likeliest token"),
    ],
)
def test_the_verb_sample_refuses_them_before_anything_starts(flags, complaint, capsys, monkeypatch):
    import asyncio

    from torchtitan_rl.cli import exit_status

    monkeypatch.setattr(exit_status, "end_with", lambda coroutine, status=int: status(asyncio.run(coroutine)))
    assert main.main(["sample", "--checkpoint", "nowhere", "--prompt", "ab", *flags]) == 1
    assert capsys.readouterr().err.startswith(complaint)


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_that_the_model_does_not_have_ends_no_completion(token):
    config = run_config()
    config.sampling.stop_token_ids = [63]
    validate(config)
    config.sampling.stop_token_ids = [63, token]
    assert refusal(validate, config) == (
        f"sampling.stop_token_ids=[63, {token}]: {token} is no token of the model, whose vocabulary has 0 to 63; leave "
        "it out"
    )
