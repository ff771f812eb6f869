"""Several turns on the real stack: what the engine sampled is what the trainer trains on, token for token."""

import json

import pytest

from tests.integration.conftest import ROOT
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.config.load import load_config

pytestmark = [pytest.mark.whole, pytest.mark.timeout(300)]


async def test_the_calculator(tmp_path, monkeypatch):
    from torchtitan_rl.train import step as module
    from torchtitan_rl.train.controller import Controller

    config = load_config(str(ROOT / "configs" / "calculator.py"))
    config.output_dir = str(tmp_path / "run")
    config.task.tool_demonstrations = 1.0  # so that a short warm start leads to calls
    config.supervised.num_steps, config.supervised.batch_size = 60, 32
    config.algorithm.tasks_per_step, config.algorithm.group_size = 8, 4
    config.controller.num_steps, config.controller.eval_tasks, config.controller.pass_at_k = 2, 16, 0
    config.controller.call_timeout_s = config.controller.sample_timeout_s = 120
    batches = []

    def recorded(groups, *args, **keywords):
        batches.append((groups, to_datums(groups, *args, **keywords)))
        return batches[-1][1]

    monkeypatch.setattr(module, "to_datums", recorded)
    async with await Controller.launch(config, backend="local") as controller:
        await controller.supervise()
        await controller.reinforce()
        evaluation, tokenizer = await controller.evaluate("validation"), controller.tokenizer
    assert evaluation.num_tasks == 16
    assert len(batches) == 2
    for groups, data in batches:
        sampled, trained, several = [], [], 0
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            several += len(rollout.turns) > 1
            for before, after in zip(rollout.turns, rollout.turns[1:]):
                text = tokenizer.decode(before.completion.tokens)
                grown = before.prompt_tokens + before.completion.tokens
                assert text.endswith("]"), "only a call is answered"
                assert after.prompt_tokens[: len(grown)] == grown
                assert tokenizer.decode(after.prompt_tokens[len(grown) :]).endswith(";")
            sampled += [
                (token, logprob)
                for turn in rollout.turns
                for token, logprob in zip(turn.completion.tokens, turn.completion.logprobs)
            ]
            assert rollout.reward == pytest.approx(sum(turn.reward for turn in rollout.turns))
        for datum in data:
            inputs = datum.loss_inputs
            columns = datum.target_tokens, inputs["sampling_logprobs"], inputs["loss_mask"]
            trained += [(token, logprob) for token, logprob, mask in zip(*(c.tolist() for c in columns)) if mask]
        assert [token for token, _ in trained] == [token for token, _ in sampled]
        assert [logprob for _, logprob in trained] == pytest.approx([logprob for _, logprob in sampled])
        assert several > 8, "the warm start calls the calculator"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "reinforcement"]
    assert all(line["rollout/turns_mean"] > 1.2 and line["mismatch/kl"] <= 1e-6 for line in steps)
