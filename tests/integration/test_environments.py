"""Environments that others wrote train the tiny chat model: what trains is what was sampled, and accuracy rises."""

import importlib
import time

import pytest

from tests.integration.conftest import ROOT
from tests.integration.test_gateway import check_that_trained_is_sampled, run
from torchtitan_rl.config.load import load_config

pytestmark = pytest.mark.whole

RUNS = {
    "last_letter_verifiers": "verifiers.v1",
    "last_letter_openenv": "openenv.core",
    "calculator_agent": "openai",
    "calculator_tools": "openai",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", RUNS)
async def test_an_environment_of_others_trains(tmp_path, capsys, name, lag):
    pytest.importorskip(RUNS[name].split(".")[0], reason="an extra of its own")
    importlib.import_module(RUNS[name])
    config = load_config(str(ROOT / "configs" / f"{name}.py"))
    config.output_dir, config.algorithm.max_policy_lag = str(tmp_path / "run"), lag
    config.controller.pass_at_k = 0
    began = time.monotonic()
    sampled, trained, report, metrics = await run(config)
    num_turns = check_that_trained_is_sampled(sampled, trained)
    steps = [line for line in metrics if line["phase"] == "reinforcement"]
    before, after, test = (report[key].accuracy for key in ("warm start", "validation", "test"))
    with capsys.disabled():
        print(
            f"\n{name}, lag {lag}: accuracy {before:.3f} -> {after:.3f} (test {test:.3f}), {num_turns} turns, "
            f"{len(steps)} steps, {time.monotonic() - began:.0f} s"
        )
    assert num_turns > 0 and all(line["rollout/drift_mean"] == 0 for line in steps)
    assert after - before >= 0.2
