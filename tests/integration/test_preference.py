"""The preference phase on real trainers in this process: its gradient, a reward model that learns, and a run with DPO
that is resumed."""

import dataclasses
from functools import partial

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import flat, relative_l2
from tests.integration.layouts import MODEL, client, trainer_config
from torchtitan_rl.algorithm import pairs
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import datum_sums
from torchtitan_rl.algorithm.pair_losses import aot_unpaired, dpo, ipo
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.model.files import assets_dir, load_tokenizer
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout.pair_tokens import pair_tokens
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.preference import PairTrainer
from torchtitan_rl.types import OptimParams
from torchtitan_rl.types.ends import Preempted

pytestmark = pytest.mark.whole

EVERYTHING = 10**6


def sequences(split: str, num: int, **config) -> pairs.Sequences:
    """Pairs of the letter-sort task as tokens."""
    family = LetterSort(LetterSort.Config(pairs=True, **config))
    policy = Policy(generator=None, tokenizer=load_tokenizer(assets_dir(MODEL)), max_tokens=16, max_prompt_tokens=16)
    return [row for index in range(num) for row in pair_tokens(family.task(split, index), policy)]


# First in this file: a local run has the process to itself, as have the meshes of the other tests.
def small(path, **overrides):
    config = small_config(path, controller__checkpoint_every=1, controller__keep_last=-1, **overrides)
    config.task = LetterSort.Config(pairs=True)
    config.preference = PreferenceConfig(num_steps=4, batch_size=4, lr=1e-3, eval_pairs=8)
    config.controller.num_steps, config.roles.reference = 0, RoleConfig()
    return config


async def run(config, *, resume_from: str = "", stop_before: int | None = None) -> dict:
    """Trains; asks the run to stop once it has made so many steps of the preference phase. Returns the parameters of
    policy and reference."""
    async with await Controller.launch(config, backend="local", resume_from=resume_from) as controller:
        take = controller.stop.reason

        def reason() -> str:
            if controller.state.phase == "preference" and controller.state.phase_step == stop_before:
                controller.stop.ask("a test")
            return take()

        controller.stop.reason = reason
        report = await controller.train()
        return {
            "report": report,
            "policy": flat(await controller.trainer.parameters()),
            "reference": flat(await controller.role("reference").parameters()),
        }


def lines_of(path) -> list[dict]:
    clocked = ("time/", "perf/")
    return [
        {name: x for name, x in line.items() if not name.startswith(clocked) and not name.endswith("_per_s")}
        for line in RunDir(path).read_metrics()
        if line["phase"] == "preference"
    ]


def test_a_run_with_dpo_begins_at_its_reference_and_is_resumed_to_the_byte(loop, tmp_path):
    whole = loop.run_until_complete(run(small(tmp_path / "whole")))
    lines = lines_of(tmp_path / "whole")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["rewards/chosen"] == lines[0]["rewards/rejected"] == 0  # the policy is the reference
    assert lines[0]["loss/mean"] == pytest.approx(0.693147, abs=1e-6)
    assert lines[1]["rewards/margin"] != 0
    assert "rewards/validation_accuracy" in lines[-1] and "rewards/validation_accuracy" not in lines[0]
    assert torch.equal(whole["policy"], whole["reference"])  # reinforcement would start here
    assert whole["report"].keys() == {"before preference", "warm start", "validation", "test"}
    names = {path.name for path in (tmp_path / "whole" / "checkpoints").glob("*-*")}
    assert names == {"supervised-1", "preference-1", "preference-2", "preference-3", "step-0"}

    config = small(tmp_path / "stopped")
    with pytest.raises(Preempted):
        loop.run_until_complete(run(config, stop_before=2))
    resumed = loop.run_until_complete(run(config, resume_from="latest"))
    assert lines_of(tmp_path / "stopped") == lines
    assert torch.equal(resumed["policy"], whole["policy"])


@pytest.fixture(scope="module")
def meshes(loop, tmp_path_factory):
    """A policy, a reference with other weights, and a critic."""
    launcher = LocalLauncher(log_dir=str(tmp_path_factory.mktemp("logs")), start_timeout_s=60, call_timeout_s=60)
    how = {"policy": ("policy", 0), "reference": ("reference", 1), "critic": ("critic", 0)}
    yield {
        name: loop.run_until_complete(launcher.start_trainer(trainer_config(), MODEL, role=role, seed=seed))
        for name, (role, seed) in how.items()
    }
    loop.run_until_complete(launcher.stop())


async def gradient_of_phase(trainer: PairTrainer, data) -> torch.Tensor:
    _, derivative = pairs.pair_loss(await trainer.scores(data), trainer.loss_fn)
    weighted, token_sum = trainer.weighted(data, derivative)
    await trainer.client.forward_backward(weighted, token_sum, temperature=1.0)
    return await taken(trainer.client)


async def taken(trainer) -> torch.Tensor:
    gradient = flat(await trainer.gradients())
    await trainer.optim_step(OptimParams(lr=0.0))
    return gradient


def whole_loss(inputs, *, loss_fn, mean: bool, sft_coef: float):
    """The loss of a minibatch that is one microbatch, through the model in one piece."""
    mask_T = inputs.loss_mask
    lengths = datum_sums(inputs, mask_T)
    numbers = datum_sums(inputs, mask_T * (inputs.policy_logprobs - inputs.reference_logprobs))
    numbers = (numbers / lengths if mean else numbers).double()
    sft = -datum_sums(inputs, mask_T * inputs.policy_logprobs)[0::2].sum() / lengths[0::2].sum()
    return loss_fn(numbers[0::2], numbers[1::2]).mean() + sft_coef * sft, {}


CONFIGS = {
    "dpo": PreferenceConfig(loss_fn=dpo, loss_config={"beta": 0.3, "label_smoothing": 0.1}),
    "ipo": PreferenceConfig(loss_fn=ipo, length_normalized=True, sft_coef=0.5),
    "across pairs": PreferenceConfig(loss_fn=aot_unpaired),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gradient_is_that_of_the_whole_loss_however_sequences_are_split(loop, meshes, name):
    config = CONFIGS[name]

    async def gradients():
        policy, reference = (client(meshes[role]) for role in ("policy", "reference"))
        trainer = PairTrainer(config, policy, reference)
        data = trainer.datums(sequences("train", 6))
        scored = with_inputs(data, reference_logprobs=(await reference.forward(data)).policy_logprobs)
        loss_fn = partial(whole_loss, loss_fn=trainer.loss_fn, mean=config.length_normalized, sft_coef=config.sft_coef)
        await policy.forward_backward(scored, loss_fn)
        expected = await taken(policy)
        # A budget of one token: no two sequences of a pair are in one microbatch.
        split = [
            dataclasses.replace(trainer, client=client(meshes["policy"], budget)) for budget in (1, 30, EVERYTHING)
        ]
        return expected, [await gradient_of_phase(each, data) for each in split]

    expected, got = loop.run_until_complete(gradients())
    assert expected.norm() > 0
    assert all(relative_l2(each, expected) <= 1e-5 for each in got)


def test_a_reward_model_tells_pairs_apart_that_it_has_not_seen(loop, meshes):
    trainer = PairTrainer(PreferenceConfig(role="critic"), client(meshes["critic"]), None)
    assert trainer.reward_scale == 1.0
    letters = {"min_letters": 3, "max_letters": 3, "num_validation": 100, "num_test": 100}
    unseen = trainer.datums(sequences("validation", 100, **letters))
    train, steps, batch = sequences("train", 60 * 16, **letters), 60, 32

    async def learned():
        before = pairs.pair_metrics(await trainer.scores(unseen), 1.0)
        split = []
        for step in range(steps):
            data = trainer.datums(train[step * batch : (step + 1) * batch])
            _, derivative = pairs.pair_loss(await trainer.scores(data), trainer.loss_fn)
            weighted, token_sum = trainer.weighted(data, derivative)
            if step == steps - 1:
                split = [
                    await gradient_of_phase(dataclasses.replace(trainer, client=client(meshes["critic"], budget)), data)
                    for budget in (1, EVERYTHING)
                ]
            await trainer.client.forward_backward(weighted, token_sum)
            await trainer.client.optim_step(OptimParams(lr=3e-3))
        return before, pairs.pair_metrics(await trainer.scores(unseen), 1.0), split

    before, after, split = loop.run_until_complete(learned())
    assert before["rewards/margin"] == before["rewards/accuracy"] == 0  # the head starts at 0
    assert after["rewards/accuracy"] >= 0.8 and after["rewards/margin"] > 0
    assert relative_l2(*split) <= 1e-5
