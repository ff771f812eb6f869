"""Attempts of a command in sandboxes on the hosts of workers, without trainers and generators: a gateway, a policy that
says what it is told to, and the workflow and the hosts of a run.

`python -m tests.integration.sandbox_run WORKER WORKER ...` prints "ready". For each line NUMBER SECONDS on its standard
input it plays that many attempts at once, whose commands take that long, and prints a line of JSON: how many sandboxes
were open on each host, and the reward of each attempt, or why it failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import monarch.actor
from transformers import AutoTokenizer

import torchtitan_rl
from tests.kit.sampler import FunctionSampler
from torchtitan_rl.config.load import load_config
from torchtitan_rl.launch.attach import attach
from torchtitan_rl.launch.sandboxes import start_sandbox_hosts
from torchtitan_rl.rollout.external import AgentFailed, external
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.tasks.sandbox import registry
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.types import Task

BYTES = AutoTokenizer.from_pretrained(Path(torchtitan_rl.__file__).parent / "assets" / "bytes")
QUICKSTART = load_config(str(Path(__file__).parents[2] / "configs" / "quickstart.py"))
SANDBOX = SandboxConfig(kind="bubblewrap", memory_gib=0.25, max_disk_mib=16, max_processes=32)
AGENT = """
import json, os, socket, time, urllib.request
task = json.load(open(os.environ["TASK_FILE"]))
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
reached = socket.socket().connect_ex(("127.0.0.1", task["other_port"])) == 0
open("reached.txt", "w").write(str(reached))
time.sleep(task["seconds"])
"""


async def judge(task, sandbox):
    assert await sandbox.read("home/reached.txt") == b"False"  # of the controller's host the gateway alone
    await sandbox.write({"checks/answer.py": b"assert open('home/answer.txt').read() == '3'"})
    done = await sandbox.run([sys.executable, "-I", "checks/answer.py"], timeout_s=60)
    return float(done.status == 0)


async def main(workers: list[str]) -> None:
    hosts = await attach(workers, timeout_s=120)

    async def spawn(name, ranks, place):
        return hosts.mesh_of(place.hosts).spawn_procs(per_host={"gpus": ranks}, name=name.replace("-", "_"))

    workflow = external(
        [sys.executable, "-I", "-c", AGENT], sandbox=SANDBOX, judge=judge, task_data=lambda task: task.answer
    )
    algorithm = dataclasses.replace(QUICKSTART.algorithm, workflow=workflow)
    run_hosts = await start_sandbox_hosts(
        dataclasses.replace(QUICKSTART, algorithm=algorithm), hosts, spawn, timeout_s=120
    )
    registry.register(run_hosts)
    sampler = FunctionSampler(lambda prompt, params: "3<|end|>", tokenizer=BYTES)
    policy = Policy(generator=sampler, tokenizer=BYTES, max_tokens=32, max_prompt_tokens=256)

    async def attempt(number: int, data: dict) -> float | str:
        task = Task(id=f"t/{number}", prompt="1+2", answer=data)
        try:
            return (await workflow(task, policy, rollout_id=f"0/0/{number}", seed=number)).reward
        except AgentFailed as error:
            return str(error)

    async with (
        Gateway(context_tokens=256) as gateway,
        await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as other,
    ):
        workflow.attach(gateway)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            number, seconds = line.split()
            data = {"prompt": "1+2", "other_port": other.sockets[0].getsockname()[1], "seconds": float(seconds)}
            attempts = asyncio.gather(*(attempt(index, data) for index in range(int(number))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            open_on = run_hosts.num_running()
            print(json.dumps({"open": open_on, "results": await attempts}), flush=True)
    registry.unregister(run_hosts)
    await run_hosts.close()
    await hosts.release()


if __name__ == "__main__":
    monarch.actor.unhandled_fault_hook = lambda failure: None
    asyncio.run(main(sys.argv[1:]))
