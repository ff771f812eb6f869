"""A newcomer's path: the quickstart, a reward of one's own in a file of one's own, and a look at both in the browser.

Run by `pytest -m slow tests/integration/test_newcomer.py`.
"""

import html
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.integration.conftest import ROOT
from tests.integration.leftovers import nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MY_REWARD = """
def my_reward(task, completions):
    return [float(len(completion) == len(task.answer)) for completion in completions]
"""
MY_CONFIG = """
from my_reward import my_reward
from quickstart import config as quickstart
from torchtitan_rl.tasks.letter_sort import LetterSort

def config():
    mine = quickstart()
    mine.task = LetterSort.Config(reward=my_reward)
    return mine
"""
SHORT = "--supervised.num-steps 3 --controller.num-steps 2 --controller.eval-tasks 8 --controller.test-tasks 8"
SHORT += " --algorithm.tasks-per-step 4 --controller.eval-every 0 --controller.pass-at-k 0"


def command(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl.cli", *arguments], cwd=folder, capture_output=True, text=True, timeout=140
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_from_the_readme_to_a_look_at_a_reward_of_ones_own(tmp_path):
    readme = (ROOT / "README.md").read_text()
    assert "LetterSort.Config(reward=my_reward)" in readme and "torchtitan-rl train" in readme
    (tmp_path / "my_reward.py").write_text(MY_REWARD)
    (tmp_path / "my_config.py").write_text(MY_CONFIG)
    (tmp_path / "quickstart.py").write_text((ROOT / "configs" / "quickstart.py").read_text())
    with nothing_left(within_s=10):
        command(tmp_path, "quickstart", "--output-dir", "runs/first", *SHORT.split())
        command(tmp_path, "train", "my_config.py", "--dry-run")
        command(tmp_path, "train", "my_config.py", "--output-dir", "runs/mine", *SHORT.split())
    looking = [sys.executable, "-m", "torchtitan_rl.cli", "view", "runs/first", "runs/mine", "--port", "0"]
    with subprocess.Popen(looking, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        url = re.search(r"http://[\d.:]+", server.stdout.readline())[0]

        def page(address):
            return html.unescape(urllib.request.urlopen(url + address).read().decode())

        assert page("/").count('data-state="finished"') == 2
        assert "my_reward:my_reward" in page("/configs") and "task.reward" in page("/configs")
        assert "64 of mine" in re.sub("<[^>]*>", "", page("/rollouts?run=mine"))
        rollout = page("/rollout?run=mine&id=0/0/0")
        assert 'class="tokens' in rollout.replace("model block tokens", "tokens") and "Siblings" in rollout
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130
