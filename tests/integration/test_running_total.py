"""What `configs/running_total.py` promises, by the command a user types. Slow: up to four minutes a run
(`scripts/acceptance.sh`)."""

import subprocess
import time

import pytest

from tests.integration.test_command_line import COMMAND, ROOT
from tests.integration.test_quickstart import lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_within_four_minutes(tmp_path, seed):
    config = str(ROOT / "configs" / "running_total.py")
    start = time.monotonic()
    subprocess.run(
        [*COMMAND, "train", config, "--output-dir", str(tmp_path / "run"), "--seed", str(seed)], check=True, timeout=800
    )
    seconds = time.monotonic() - start
    evaluations = lines(tmp_path / "run", "evaluation")
    (test,) = [record for record in evaluations if record["eval/split"] == "test"]
    print(f"\nwarm start {evaluations[0]['eval/accuracy']:.3f}, test {test['eval/accuracy']:.3f}, {seconds:.0f} s")
    assert evaluations[0]["eval/accuracy"] <= 0.5 and test["eval/accuracy"] >= 0.9
    assert seconds <= 240
