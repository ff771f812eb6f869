"""The policy as its own teacher on the real stack: which version scores, what a turn is given, what a checkpoint
keeps."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import small_config
from tests.integration.helpers import scored_by
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.algorithm.soft_targets import with_soft_columns
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.self_distill import distill_group, self_distill
from torchtitan_rl.tasks.letter_sort import hinted
from torchtitan_rl.weights import checkpoint

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]


def answer_as_hint(rollout):
    return hinted(rollout.task.prompt.removesuffix("="), rollout.task.answer)


def best_sibling_as_hint(rollout, siblings):
    best = max(siblings, key=lambda other: other.reward)
    return hinted(rollout.task.prompt.removesuffix("="), best.text) if best.reward > rollout.reward else None


@pytest.fixture(scope="module")
def running(loop, tmp_path_factory):
    """A controller after two warm-up and four reinforcement steps, with the (version, tokens) of every score."""
    from torchtitan_rl.train.controller import Controller

    config = small_config(
        tmp_path_factory.mktemp("self_distill") / "run",
        algorithm__loss_fn=importance_sampling,
        algorithm__loss_config={},
        algorithm__precomputed_advantages="require",
        algorithm__refresh_teacher_every=2,
        algorithm__workflow=self_distill(single_turn, prompt=answer_as_hint),
        controller__num_steps=4,
    )

    async def run():
        controller, scored = await Controller.launch(config, backend="local"), []
        score = controller.generator.score

        async def recorded(tokens, *, policy_version=None):
            scored.append((controller.state.step, policy_version, tokens))
            return await score(tokens, policy_version=policy_version)

        controller.generator.score = recorded
        await controller.supervise()
        await controller.reinforce()
        return controller, scored

    controller, scored = loop.run_until_complete(run())
    yield controller, scored
    loop.run_until_complete(controller.close())


def test_the_teacher_is_the_version_that_reinforcement_starts_from_until_it_is_refreshed(running):
    controller, scored = running
    per_step = 16  # four groups of four
    assert [(step, version) for step, version, _ in scored] == [
        (step, version) for step, version in ((0, 2), (1, 2), (2, 4), (3, 4)) for _ in range(per_step)
    ]
    assert controller.weights.teacher_version == 6 == controller.policy_version
    assert [version for version, holders in controller.versions.holders().items() if "teacher" in holders] == [6]


def test_evaluations_score_nothing_and_demonstrations_neither(loop, running):
    controller, scored = running
    before = len(scored)
    loop.run_until_complete(controller.evaluate("validation", num_tasks=4, pass_at_k=2))
    loop.run_until_complete(controller.player.demonstrations(controller.draws.source.next(2), controller.family))
    assert len(scored) == before


def test_a_turn_has_the_scores_of_the_hinted_prompt_as_advantages_and_trains_with_them(loop, running):
    controller, _ = running

    async def run():
        groups = await controller.rollouts(controller.draws.next(2))
        rollout = groups[0].rollouts[0]
        hint = controller.tokenizer.encode(answer_as_hint(rollout), add_special_tokens=False)
        said = rollout.turns[0].completion
        scores = await controller.generator.score(
            [*hint, *said.tokens], policy_version=controller.weights.teacher_version
        )
        return groups, rollout.turns[0], scores[len(hint) - 1 :], await scored_by(controller, groups)

    groups, turn, teacher, data = loop.run_until_complete(run())
    assert turn.advantages == pytest.approx([t - s for s, t in zip(turn.completion.logprobs, teacher)], abs=1e-5)
    assert all(group.precomputed for group in groups)
    trained = data[0].loss_inputs["advantages"][data[0].loss_inputs["loss_mask"] > 0]
    assert trained.tolist() == pytest.approx(turn.advantages, abs=1e-6)


def test_a_checkpoint_holds_the_teacher_and_its_number(loop, running):
    controller, _ = running

    async def run():
        teacher = await controller.trainer.parameters()
        await controller.train_on(await controller.rollouts(controller.draws.next(4)))
        await controller.publish()
        return await controller.save_checkpoint(), teacher, await controller.trainer.parameters()

    path, parameters, newest = loop.run_until_complete(run())
    assert controller.weights.teacher_version == 6 and controller.policy_version == 7
    assert not torch.equal(parameters["lm_head.weight"], newest["lm_head.weight"])
    assert json.loads((path / "state.json").read_text())["teacher_version"] == controller.weights.teacher_version
    saved = load_file(checkpoint.teacher_file(path))
    assert {name: tensor.shape for name, tensor in saved.items() if name in parameters} == {
        name: tensor.shape for name, tensor in parameters.items()
    }
    assert all(torch.equal(saved[name], tensor) for name, tensor in parameters.items())  # float32 there, too


def test_data_that_carry_what_a_teacher_said_are_not_trained_on_as_if_they_did_not(loop, running):
    controller, _ = running

    async def run():
        data = await scored_by(controller, await controller.rollouts(controller.draws.next(1)))
        soft = [(torch.zeros(len(datum), 2, dtype=torch.long), torch.zeros(len(datum), 2)) for datum in data]
        with pytest.raises(
            ValueError, match=r"'soft_tokens': holds token ids, .* with algorithm.soft_targets.appended"
        ):
            controller.trainer.forward_backward(with_soft_columns(data, soft), importance_sampling)

    loop.run_until_complete(run())


def test_a_warm_start_after_a_first_look_at_rollouts_is_where_the_teacher_begins(loop, running):
    controller, _ = running
    before = controller.weights.teacher_version
    loop.run_until_complete(controller.supervise())
    assert controller.weights.teacher_version == controller.policy_version > before
    assert [version for version, holders in controller.versions.holders().items() if "teacher" in holders] == [
        controller.policy_version
    ]


def test_siblings_that_did_better_teach_with_their_likeliest_tokens(loop, running):
    controller, _ = running
    algorithm = controller.config.algorithm
    workflow = algorithm.workflow
    algorithm.workflow, algorithm.after_rewards = None, distill_group(prompt=best_sibling_as_hint, top_k=3)

    async def run():
        groups = await controller.rollouts(controller.draws.next(4))
        return groups, await controller.train_on(groups)

    try:
        groups, line = loop.run_until_complete(run())
    finally:
        algorithm.workflow, algorithm.after_rewards = workflow, None
    for group in groups:
        best = max(group.rewards)
        for rollout in group.rollouts:
            (turn,) = rollout.turns
            assert (turn.soft_targets is None) == (rollout.reward == best)
            assert turn.advantages == [0.0] * len(turn.completion.tokens)
            for tokens, weights in zip(*(turn.soft_targets or ((), ()))):
                assert len(set(tokens.tolist())) == 3 and weights.tolist() == sorted(weights.tolist(), reverse=True)
                assert 0 < weights.sum() <= 1 + 1e-6
    assert line["distill/kl"] > 0 and line["optim/grad_norm"] > 0 and line["mismatch/kl"] < 1e-6
