"""The config of a run whose agent is a command in a sandbox, judged there: two steps of configs/calculator_agent.py.
The part `remote` of its reward is 1 for a sandbox that is not on the controller's host."""

import dataclasses
import sys
from pathlib import Path

from torchtitan_rl.config.load import load_config
from torchtitan_rl.dispatch.remote_sandbox import RemoteSandbox
from torchtitan_rl.rollout.external import external
from torchtitan_rl.tasks.sandbox.config import SandboxConfig

AGENT = """
import json, os, urllib.request
task = json.load(open(os.environ["TASK_FILE"]))
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": task["prompt"], "max_tokens": 8}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""


async def judge(task, sandbox):
    await sandbox.write({"checks/length.py": b"print(len(open('home/answer.txt').read()))"})
    done = await sandbox.run([sys.executable, "-I", "checks/length.py"], timeout_s=60)
    return int(done.stdout) / 8, {"remote": float(isinstance(sandbox, RemoteSandbox))}


def config():
    made = load_config(str(Path(__file__).parents[2] / "configs" / "calculator_agent.py"))
    made.algorithm.workflow = external(
        [sys.executable, "-I", "-c", AGENT],
        sandbox=SandboxConfig(kind="bubblewrap", memory_gib=0.25, max_disk_mib=16, max_processes=32),
        judge=judge,
        imitated=made.algorithm.workflow.imitated,
    )
    made.algorithm = dataclasses.replace(made.algorithm, tasks_per_step=4, group_size=4)
    made.supervised.num_steps = 2
    made.supervised.batch_size = 8
    made.controller = dataclasses.replace(
        made.controller, num_steps=2, eval_every=0, eval_tasks=4, test_tasks=4, pass_at_k=0
    )
    return made
