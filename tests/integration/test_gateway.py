"""A run whose rollouts agents play through the gateway, with the real engine: what trains is what was sampled."""

import asyncio
import functools

import pytest

from tests.integration.conftest import ROOT
from torchtitan_rl.config.load import load_config
from torchtitan_rl.train.controller import Controller

pytestmark = pytest.mark.whole


def small(output_dir, **algorithm):
    config = load_config(str(ROOT / "configs" / "calculator_agent.py"))
    config.output_dir = str(output_dir)
    config.supervised.num_steps, config.supervised.batch_size = 2, 4
    config.algorithm.tasks_per_step, config.algorithm.group_size = 4, 4
    config.controller.num_steps, config.controller.eval_every, config.controller.pass_at_k = 2, 0, 0
    config.controller.eval_tasks = config.controller.test_tasks = 8
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    return config


def watched(controller):
    """(what was asked of the generators and what they said, the data that trained), filled while the run goes on."""
    sampled, trained = [], []
    sample, forward_backward = controller.generator.sample, controller.trainer.forward_backward

    async def sample_(tokens, params, **more):
        completion = await sample(tokens, params, **more)
        sampled.append((list(tokens), list(completion.tokens), list(completion.logprobs)))
        return completion

    def forward_backward_(data, *args, **more):
        trained.extend(data)
        return forward_backward(data, *args, **more)

    controller.generator.sample, controller.trainer.forward_backward = sample_, forward_backward_
    return sampled, trained


def check_that_trained_is_sampled(sampled, trained):
    """Each turn of each datum: its prompt and its tokens are those of one request, and only they have a loss."""
    said = {}  # several log-probabilities where versions said the same
    for asked, answered, logprobs in sampled:
        said.setdefault((tuple(asked), tuple(answered)), []).append(logprobs)
    num_turns = 0
    for datum in trained:
        mask, of_turns = datum.loss_inputs["loss_mask"].tolist(), 0
        for _, first, count in datum.turns:
            prompt = tuple(datum.tokens[: first + 1].tolist())
            tokens = tuple(datum.target_tokens[first : first + count].tolist())
            logprobs = datum.loss_inputs["sampling_logprobs"][first : first + count].tolist()
            assert any(logprobs == pytest.approx(one, abs=1e-6) for one in said[prompt, tokens])
            of_turns += sum(mask[first : first + count])
            num_turns += 1
        assert of_turns == sum(mask)
    return num_turns


async def run(config, backend="local"):
    async with await Controller.launch(config, backend=backend) as controller:
        sampled, trained = watched(controller)
        supervised = []
        original = controller.supervise

        async def supervise():
            await original()
            supervised.append(len(trained))

        controller.supervise = supervise
        report = await controller.train()
        port = controller.gateway.port
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)
    return sampled, trained[supervised[0] :], report, list(controller.run_dir.read_metrics())


@pytest.mark.parametrize("lag", [0, 1])
async def test_what_trains_is_what_was_sampled(tmp_path, lag):
    sampled, trained, report, metrics = await run(small(tmp_path / "run", max_policy_lag=lag))
    assert check_that_trained_is_sampled(sampled, trained) >= 32  # two batches of 16 rollouts
    lines = [line for line in metrics if line["phase"] == "reinforcement"]
    assert len(lines) == 2 and all(line["rollout/drift_mean"] == 0 for line in lines)
    assert report["test"].num_tasks == 8


async def test_agents_that_fail_cost_their_groups(tmp_path):
    config = small(tmp_path / "run", on_rollout_failure="drop_group", max_failed_frac=1.0)
    plays, broken = config.algorithm.workflow.agent, []

    @functools.wraps(plays)
    async def agent(task, endpoint):
        if endpoint.training and (not broken or task.id in broken):
            broken.append(task.id)
            raise RuntimeError("no")
        return await plays(task, endpoint)

    config.algorithm.workflow.agent = agent
    _, trained, _, metrics = await run(config)
    first, second = (line for line in metrics if line["phase"] == "reinforcement")
    assert (first["failure/workflow"], first["failure/dropped_groups"]) == (4, 1)
    assert trained and "failure/dropped_groups" not in second or second["failure/dropped_groups"] == 0
