"""A task in Harbor's format, played by a command through the gateway."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.kit.sampler import policy
from tests.unit.serve.opened import BYTES, END
from torchtitan_rl.rollout.external import AgentFailed, external
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks import harbor
from torchtitan_rl.tasks.sandbox import bubblewrap
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.types import Task

TASK = Path(__file__).parents[3] / "environments" / "harbor" / "last_letter"
AGENT = (sys.executable, str(TASK.parent / "agent.py"))


async def play(said, task=TASK, agent=AGENT, sandbox=None):
    made = policy(said + END, tokenizer=BYTES, for_training=True, max_prompt_tokens=128)
    async with Gateway(context_tokens=256) as gateway:
        command = [sys.executable, harbor.__file__, str(task), *agent]
        workflow = external(command, timeout_s=60, sandbox=sandbox)
        workflow.attach(gateway)
        return await workflow(Task(id="letter", prompt=""), made, rollout_id="0/0/0", seed=5)


@pytest.mark.parametrize("said, reward", [("w", 1.0), ("k", 0.0)])
async def test_the_tests_of_the_task_judge_what_the_agent_left(said, reward):
    rollout = await play(said)
    assert (rollout.reward, rollout.text) == (reward, said)
    assert "Write the last letter" in BYTES.decode(rollout.turns[0].prompt_tokens)
    assert (TASK / "environment").exists() and not (TASK / "answer.txt").exists()


@pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}")
async def test_a_task_is_played_in_a_sandbox_that_is_shown_its_files():
    seen = (str(TASK.parent), str(Path(harbor.__file__).parent))
    rollout = await play("w", sandbox=SandboxConfig(kind="bubblewrap", read_only=seen))
    assert (rollout.reward, rollout.text) == (1.0, "w")


def changed(tmp_path, file, text):
    shutil.copytree(TASK, tmp_path / "task")
    (tmp_path / "task" / file).unlink() if text is None else (tmp_path / "task" / file).write_text(text)
    return tmp_path / "task"


GIVES = "echo '{}' > $HARBOR_LOGS/verifier/reward.json"


async def test_a_reward_of_several_numbers(tmp_path):
    script = 'echo \'{"right": 1.0, "short": 0.5}\' > $HARBOR_LOGS/verifier/reward.json; ls $HARBOR_TESTS/test.sh'
    rollout = await play("w", changed(tmp_path, "tests/test.sh", script))
    assert (rollout.reward, rollout.reward_parts) == (0.75, {"right": 1.0, "short": 0.5})


@pytest.mark.parametrize("new_session", [False, True])
async def test_rewards_and_tests_that_an_agent_wrote_do_not_count(tmp_path, new_session):
    forging = f"""
import os, pathlib, subprocess
ours = pathlib.Path(os.environ["TMPDIR"])
(ours / "harbor-logs" / "verifier" / "reward.json").write_text('{{"reward": 1.0}}')
(ours / "harbor-tests").mkdir()
subprocess.Popen("sleep 1; echo late > late", shell=True, start_new_session={new_session})
"""
    agent = (*AGENT[:1], "-c", f"{forging}\nimport runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])")
    script = "sleep 2; (test -e late && echo 1 || echo 0) > $HARBOR_LOGS/verifier/reward.txt"
    rollout = await play("w", changed(tmp_path, "tests/test.sh", script), (*agent, AGENT[1]))
    assert (rollout.reward, rollout.reward_parts) == (0.0, {})


@pytest.mark.parametrize("fails", [False, True])
async def test_a_reward_that_an_agent_posted_does_not_count(tmp_path, fails):
    posting = """
import json, os, urllib.request
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["SESSION_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, json.dumps({"reward": 1.0}).encode(), headers))
"""
    end = "raise SystemExit(3)" if fails else ""
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    agent = (sys.executable, "-c", f"{posting}\n{run}\n{end}", AGENT[1])
    if fails:
        with pytest.raises(AgentFailed, match="ended with status 3"):
            await play("k", agent=agent)
    else:
        assert (await play("k", agent=agent)).reward == 0.0


@pytest.mark.parametrize(
    "file, text, agent, message",
    [
        ("task.toml", "[agent", AGENT, "not a task in Harbor's format"),
        ("tests/test.sh", "true", AGENT, "left no reward"),
        ("tests/test.sh", GIVES.format('{"reward": null}'), AGENT, "left no reward .*NoneType"),
        ("tests/test.sh", GIVES.format('{"a": {"b": 1}}'), AGENT, "left no reward .*dict"),
        ("tests/test.sh", GIVES.format("{}"), AGENT, "left no reward .reward.json has no numbers"),
        ("tests/test.sh", None, ("no-such-agent",), "has no tests/test.sh"),
        ("instruction.md", "x", ("no-such-agent",), "cannot be started"),
        ("instruction.md", "x", (sys.executable, "-c", "raise SystemExit(3)"), "ended with status 3"),
        ("instruction.md", "x", (), "agent: is missing"),
    ],
)
async def test_what_cannot_run_is_a_failure_that_says_so(tmp_path, file, text, agent, message):
    with pytest.raises(AgentFailed, match=message):
        await play("w", changed(tmp_path, file, text), agent)
