"""The config of a replay, before anything starts."""

from pathlib import Path

import pytest

from tests.kit.runs import made_run
from torchtitan_rl.cli.replay import _config
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.train.recorded_attempt import RecordedAttempt
from torchtitan_rl.validation.run import check_local


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_run_whose_replicas_came_and_went_is_replayed_by_as_many_as_it_had(tmp_path, num_engines):
    run_dir = made_run(tmp_path / "run")
    config = load_config(str(Path(__file__).parents[3] / "configs" / "quickstart.py"))
    config.generator.max_replicas = 2  # at a time: with three engines a lost one was replaced
    config.controller.checkpoint_every, config.controller.keep_every = 20, 40
    config.controller.keep_best = "validation"
    run_dir.write_config(resolved(settled(config)))
    recorded = RecordedAttempt(
        run=run_dir.path,
        number=1,
        first=0,
        last=3,
        checkpoint=None,
        num_requests=0,
        num_engines=num_engines,
        environment={},
    )
    made = _config(recorded, str(tmp_path / "replay"))
    assert (made.generator.num_replicas, made.generator.max_replicas) == (num_engines, None)
    if num_engines == 1:
        check_local(made)
