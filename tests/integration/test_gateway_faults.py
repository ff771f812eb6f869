"""A generator that dies while agents wait: another replica answers, or the request fails with a clear error."""

import asyncio
import os
import signal
from collections import Counter

import openai
import pytest

from tests.integration.conftest import ROOT
from tests.integration.helpers import gone
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.config.load import load_config
from torchtitan_rl.serve.run_gateway import Address, serving
from torchtitan_rl.train.controller import Controller

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

ASKED = {"model": "policy", "messages": [{"role": "user", "content": "1+2"}], "max_tokens": 16}


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.1)


def test_a_killed_generator_under_load(loop, tmp_path, capsys):
    config = load_config(str(ROOT / "configs" / "tiny_chat.py"))
    config.output_dir, config.generator.num_replicas = str(tmp_path / "run"), 2
    config.generator.max_replica_restarts = 0

    async def scene():
        async with await Controller.launch(config) as controller:
            async with serving(controller, Address(port=0), quiet=False):
                url = capsys.readouterr().err.split("serving ")[1].split(" ")[0]
                statuses, stop = Counter(), asyncio.Event()

                async def client():
                    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as sdk:
                        while not stop.is_set():
                            try:
                                answer = await sdk.chat.completions.create(**ASKED, extra_body={"ignore_eos": True})
                                statuses[answer.usage.completion_tokens == 16] += 1
                            except openai.APIStatusError as error:
                                assert error.status_code == 503 and "generator" in str(error)
                                statuses[503] += 1

                async def killed(index):
                    (pid,) = await controller.generator._replicas[index].mesh.call_each(WorkerProcess.pid)
                    os.kill(pid, signal.SIGKILL)
                    await gone(pid)

                clients = [asyncio.ensure_future(client()) for _ in range(16)]
                await until(lambda: statuses[True] > 0)
                await killed(0)
                enough = statuses[True] + 48  # more than were in flight: the replica that is left answers
                await until(lambda: statuses[True] > enough)
                assert not statuses[503] and not statuses[False]
                await killed(1)
                await until(lambda: statuses[503] > 0)  # nobody is left, and the gateway says so
                async with openai.AsyncOpenAI(base_url=url, api_key="none") as sdk:
                    assert (await sdk.models.list()).data[0].id == "policy"
                stop.set()
                await asyncio.gather(*clients)

    loop.run_until_complete(scene())
