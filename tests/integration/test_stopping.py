"""Runs that a rule ends before their last step, on the local backend."""

import json

import pytest

from tests.integration.conftest import small_config
from torchtitan_rl.config.run import EvalSetConfig
from torchtitan_rl.config.sampling import AlteredSampling
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.early_stop import Collapsed
from torchtitan_rl.train.resume import find


async def trained(config, *, resume_from: str = ""):
    """The controller after its run, and what `train` returned."""
    async with await Controller.launch(config, backend="local", resume_from=resume_from) as controller:
        return controller, await controller.train()


def config(path, **settings):
    settings = {"controller__num_steps": 6, "controller__eval_every": 1, "controller__checkpoint_every": 1} | settings
    made = small_config(path, **settings)
    made.trainer.optimizer.lr = 1e-6  # accuracies stay what they are after two steps of the warm start
    return made


def test_patience_ends_a_run_well_and_its_resumption_too(loop, tmp_path):
    patient = config(tmp_path / "run", controller__stop__patience=2)
    controller, report = loop.run_until_complete(trained(patient))
    accuracies = [report[name].accuracy for name in ("warm start", "validation")]
    assert accuracies[0] == accuracies[1] and controller.state.step == 2
    lines = controller.run_dir.read_metrics()
    assert [line["stop/reason"] for line in lines if line["phase"] == "stop"] == [
        "controller.stop.patience=2: 2 evaluations in a row are no better than the validation accuracy of "
        f"{accuracies[0]:.3f} after step 0"
    ]
    splits = [line["eval/split"] for line in lines if line["phase"] == "evaluation"]
    assert splits == ["validation"] * 3 + ["test"] and attempts.reason_of_end(controller.run_dir) == ""
    assert sorted(path.name for path in controller.run_dir.checkpoints.glob("step-*")) == ["step-0", "step-1", "step-2"]
    assert (controller.run_dir.checkpoint_path(2) / "hf").is_dir() and audit(controller.run_dir)[1] == []
    again, report = loop.run_until_complete(trained(patient, resume_from="auto"))
    assert again.state.step == 2 and again.ended_early == controller.ended_early  # nothing is left to do
    assert report["validation"].accuracy == accuracies[0]
    lines = [line for line in again.run_dir.read_metrics() if line["phase"] == "evaluation"]
    assert [line["step"] for line in lines if line["eval/split"] == "validation"] == [0, 1, 2]  # none is made twice


def test_a_collapse_ends_a_run_for_good_with_a_checkpoint(loop, tmp_path):
    fragile = config(tmp_path / "run", controller__stop__min_entropy=100.0, controller__stop__collapse_batches=2)
    with pytest.raises(Collapsed, match="controller.stop.min_entropy=100: held for 2 batches in a row") as caught:
        loop.run_until_complete(trained(fragile))
    run_dir = RunDir(tmp_path / "run")
    found = find(fragile, "latest")
    assert found.checkpoint.name == "step-2" and found.state["collapse"] == {}
    assert json.loads((run_dir.path / "ended.json").read_text())["reason"] == str(caught.value)
    assert audit(run_dir)[1] == []
    with pytest.raises(ValueError, match="a restart cannot mend why this run ended: controller.stop.min_entropy=100"):
        find(fragile, "auto")


def test_an_evaluation_with_top_k_1_says_greedily_what_it_samples(loop, controller, monkeypatch):
    said, sample = [], controller.generator.sample

    async def listened(tokens, params, **named):
        said.append((params.temperature, tuple(tokens), await sample(tokens, params, **named)))
        return said[-1][2]

    settings = controller.config.controller
    monkeypatch.setattr(controller.generator, "sample", listened)
    monkeypatch.setattr(settings, "eval_sampling", AlteredSampling(top_k=1))
    loop.run_until_complete(controller.evaluate("validation", num_tasks=4, pass_at_k=3))
    greedy = {prompt: completion.tokens for temperature, prompt, completion in said if temperature == 0}
    sampled = [(prompt, completion) for temperature, prompt, completion in said if temperature > 0]
    assert len(greedy) == 4 and len(sampled) == 12
    assert all(completion.tokens == greedy[prompt] for prompt, completion in sampled)
    assert {completion.filtered for _, completion in sampled} == {"top_k=1"}
    said.clear()
    nucleus = EvalSetConfig(num_tasks=4, num_samples=3, sampling=AlteredSampling(top_p=0.5, repetition_penalty=1.5))
    monkeypatch.setattr(settings, "eval_sets", {"nucleus": nucleus})
    monkeypatch.setattr(controller.evaluations, "families", {"nucleus": controller.family})
    loop.run_until_complete(controller.evaluate_sets())
    assert {completion.filtered for _, _, completion in said} == {"top_p=0.5, repetition_penalty=1.5"}
