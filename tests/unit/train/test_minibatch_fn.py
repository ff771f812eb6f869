"""`algorithm.minibatch_fn` within an optimizer step: what it is called with, and who gets its answer."""

import asyncio
import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.kit.rollouts import group, rollout, turn
from tests.unit.algorithm.test_objective import mismatched
from torchtitan_rl.algorithm.corrections import masked_token
from torchtitan_rl.algorithm.inputs import with_inputs, without_inputs
from torchtitan_rl.algorithm.minibatch_statistics import clip_cov, kl_cov, reads_batch_start, reads_entropy
from torchtitan_rl.algorithm.terms import with_kept_weights
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig, RolesConfig, RunConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.train.step import take_step, training_data


class Client:
    """Answers every call with fixed numbers, and keeps the data of the calls."""

    def __init__(self):
        self.scored, self.trained = [], []

    async def forward(self, data, *, entropy=False):
        self.scored.append((data, entropy))
        scores = [[torch.full((len(datum),), value) for datum in data] for value in (-2.0, 0.5)]
        return SimpleNamespace(policy_logprobs=scores[0], entropy=scores[1] if entropy else [])

    def forward_backward(self, data, loss_fn, **settings):
        self.trained.append(data)
        return asyncio.sleep(0, SimpleNamespace(policy_logprobs=[], loss=0.0, metrics={}))

    def optim_step(self, params):
        return asyncio.sleep(0, SimpleNamespace(grad_norm=1.0, skipped=False))


class Line:
    num_steps = 0

    def add_step(self, *outputs):
        pass

    def add(self, name, value):
        pass


def step(data, *, critic=False, **algorithm):
    """(policy, critic) after an optimizer step on the data."""
    roles = {"policy": Client()} | ({"critic": Client()} if critic else {})
    config = RunConfig(
        name="unit",
        task=LetterSort.Config(),
        model=ModelConfig(),
        generator=GeneratorConfig(),
        algorithm=AlgorithmConfig(**algorithm),
        roles=RolesConfig(critic=RoleConfig(trainer=TrainerConfig()) if critic else None),
    )
    asyncio.run(take_step(data, roles, config, 0, Line()))
    return roles["policy"], roles.get("critic")


DATA = without_inputs(mismatched(0, torch.float32), "old_logprobs", "policy")


class Doubled:
    """A `minibatch_fn` that doubles advantages, and keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, data, **config):
        self.calls.append((data, config))
        return with_inputs(data, advantages=[2 * datum.loss_inputs["advantages"] for datum in data])


def test_it_is_called_once_with_all_datums_and_the_policy_before_the_step():
    doubled = Doubled()
    policy, critic = step(
        DATA,
        critic=True,
        minibatch_fn=doubled,
        minibatch_config={"fraction": 0.5},
        recompute_logprobs_per_minibatch=True,
    )
    ((data, config),) = doubled.calls
    assert config == {"fraction": 0.5} and len(data) == len(DATA) and policy.scored == [(DATA, False)]
    assert all((datum.loss_inputs["old_logprobs"] == -2.0).all() for datum in data)
    assert not any("old_entropy" in datum.loss_inputs for datum in data)
    ((trained,), (of_critic,)) = policy.trained, critic.trained
    for before, after, other in zip(DATA, trained, of_critic, strict=True):
        assert torch.equal(after.loss_inputs["advantages"], 2 * before.loss_inputs["advantages"])
        assert torch.equal(other.loss_inputs["advantages"], before.loss_inputs["advantages"])


def test_a_function_that_reads_entropy_gets_it():
    doubled = Doubled()
    policy, _ = step(DATA, minibatch_fn=partial(reads_entropy(doubled)), recompute_logprobs_per_minibatch=True)
    assert policy.scored == [(DATA, True)]
    assert all((datum.loss_inputs["old_entropy"] == 0.5).all() for datum in doubled.calls[0][0])


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_function_that_reads_the_start_of_the_batch_gets_it(num_steps, monkeypatch):
    monkeypatch.setattr(Line, "num_steps", num_steps)
    scored = with_inputs(DATA, old_logprobs=[torch.full((len(datum),), -3.0) for datum in DATA])
    doubled = Doubled()
    policy, _ = step(scored, minibatch_fn=reads_batch_start(doubled), recompute_logprobs_per_minibatch=True)
    assert policy.scored == [(scored, False)]
    for datum in doubled.calls[0][0]:  # before the first step the two are the same policy, so not a bit differs
        assert (datum.loss_inputs["old_logprobs"] == -2.0).all()
        assert (datum.loss_inputs["batch_logprobs"] == (-2.0 if num_steps == 0 else -3.0)).all()


def test_a_batch_is_scored_before_its_first_step_for_a_function_that_reads_its_start():
    groups = [group(rollout("a", turn([1], [2, 3]), reward=1.0), rollout("b", turn([1], [4]), reward=0.0))]
    for function, scores in ((kl_cov, 1), (clip_cov, 0)):
        policy = Client()
        config = AlgorithmConfig(minibatch_fn=function, num_epochs=2, recompute_logprobs_per_minibatch=True)
        data = asyncio.run(training_data(groups, {"policy": policy}, config))
        assert len(policy.scored) == scores
        assert ["old_logprobs" in datum.loss_inputs for datum in data] == [scores == 1] * 2


def test_it_sees_the_weights_of_kept_tokens():
    doubled = Doubled()
    settings = {
        "correction_fn": masked_token,
        "correction_config": {"high": 2.0},
        "correction_denominator": "kept",
        "recompute_logprobs_per_minibatch": True,
    }
    step(DATA, minibatch_fn=doubled, **settings)
    scored = with_inputs(DATA, old_logprobs=[torch.full((len(datum),), -2.0) for datum in DATA])
    expected = with_kept_weights(scored, AlgorithmConfig(**settings))
    seen = doubled.calls[0][0]
    for mine, theirs in zip(seen, expected, strict=True):
        assert torch.equal(mine.loss_inputs["token_weights"], theirs.loss_inputs["token_weights"])
    assert any((a.loss_inputs["token_weights"] != b.loss_inputs["token_weights"]).any() for a, b in zip(seen, DATA))


def test_without_it_the_data_are_passed_on_as_they_are():
    policy, _ = step(DATA)
    assert policy.trained[0] is DATA and not policy.scored


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda data: None, "returned a NoneType that is no list of datums"),
        (lambda data: data[:-1], "returned 7 datums of 8; return all in their order, and give tokens"),
        (lambda data: data[::-1], "changed the tokens of datum 0; return the datums in their order"),
        (lambda data: without_inputs(data, "advantages"), "took advantages off datum 0; return every column"),
        (
            lambda data: with_inputs(data, loss_mask=[1 - datum.loss_inputs["loss_mask"] for datum in data]),
            "changed loss_mask of datum 0, over which metrics are means; change token_weights",
        ),
    ],
)
def test_an_answer_that_is_not_the_same_sequences_is_refused(answer, message):
    data = [dataclasses.replace(datum, tokens=torch.arange(len(datum)) + i) for i, datum in enumerate(DATA)]
    with pytest.raises(ValueError, match=f"algorithm.minibatch_fn: {message}"):
        step(data, minibatch_fn=answer, recompute_logprobs_per_minibatch=True)
