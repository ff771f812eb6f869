"""Environments of the OpenEnv kind: their seeds as a task family, and an agent that plays them as a conversation.

https://github.com/meta-pytorch/OpenEnv. An environment is a server of its own, met by the package's client. The agent
meets the policy at the gateway's endpoint (rollout/external.py). docs/environments.md shows a run.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["OpenEnv", "served"]

_START_S = 120.0
_AGAIN_S = 300.0
"""Seconds in which a server that did not answer is not started again: every attempt of a batch would wait for it."""


class OpenEnv:
    """One environment; a task is a seed for its `reset`, and the splits share no seed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        num_train: int = 100_000
        """Number of train seeds."""
        num_validation: int = 256
        """Number of validation seeds."""
        num_test: int = 512
        """Number of test seeds."""
        demonstrate: Callable[[int, random.Random], list[str]] | None = None
        """Gives the replies of an episode to imitate: `(seed, generator of random numbers) -> texts`."""

        def build(self) -> OpenEnv:
            return OpenEnv(self)

    name = "openenv"

    def __init__(self, config: OpenEnv.Config) -> None:
        self.config = config
        self._num = {"validation": config.num_validation, "test": config.num_test, "train": config.num_train}
        self._first = {"validation": 0, "test": config.num_validation, "train": config.num_validation + config.num_test}

    @staticmethod
    def agent(server: str, *, say: Callable[[dict], str], act: Callable[[str], dict]) -> Callable:
        """What `external` takes: plays one episode and gives the sum of its rewards.

        `server` is a URL, or `module:app`, which is then served on this machine. `say` makes a user's message of an
        observation, `act` an action of a reply; observations and actions are plain data, as they travel.
        """
        return functools.partial(play, server=server, say=say, act=act)

    def num_tasks(self, split: str) -> int:
        check_split(split)
        return self._num[split]

    def task(self, split: str, index: int) -> Task:
        """`answer` is the seed. Only train tasks carry a demonstration: one text per turn."""
        check_index(self, split, index)
        seed = self._first[split] + index
        demonstration = None
        if split == "train" and self.config.demonstrate is not None:
            demonstration = self.config.demonstrate(seed, random.Random(stable_hash("demonstration", seed)))
        return Task(id=f"{self.name}/{split}/{index}", prompt=f"seed {seed}", answer=seed, demonstration=demonstration)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        raise RuntimeError(
            "openenv: an environment judges its own steps; set algorithm.workflow=external(OpenEnv.agent(...))"
        )


async def play(task: Task, endpoint: Any, *, server: str, say: Callable, act: Callable) -> float:
    """One episode: the sum of the rewards of its steps. Where the session is at a limit, the sum so far is posted."""
    import httpx
    from openai import BadRequestError
    from openenv.core import GenericEnvClient

    sdk = _sdk().copy(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages, reward = [], 0.0
    url = await asyncio.to_thread(served, server)
    async with GenericEnvClient(base_url=url) as env:
        result = await env.reset(seed=task.answer)
        while not result.done:
            messages.append({"role": "user", "content": say(result.observation)})
            try:
                answer = await sdk.chat.completions.create(model=endpoint.model, messages=messages)
            except BadRequestError:
                headers = {"Authorization": f"Bearer {endpoint.api_key}"}
                async with httpx.AsyncClient(headers=headers, trust_env=False) as client:
                    await client.post(f"{endpoint.session_url}/reward", json={"reward": reward})
                raise
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            result = await env.step(act(text))
            reward += float(result.reward or 0.0)
    return reward


def served(server: str) -> str:
    """The URL of a server; `module:app` is started by uvicorn in a process of its own, which ends with this one.

    Raises RuntimeError for a server that does not answer within two minutes, and then at once for some minutes.
    """
    if "://" in server:
        return server
    with _STARTING:
        process, url = _servers.get(server, (None, ""))
        dead = process is None or process.poll() is not None  # not yet started, or it has died
        if dead and time.monotonic() >= _start_again_at.get(server, 0.0):
            process, url = _started(server)
            _servers[server] = process, url
            if not url:
                _start_again_at[server] = time.monotonic() + _AGAIN_S
    if not url:
        raise RuntimeError(
            f"openenv: server {server!r} did not answer; start it by hand and mend it: python -m uvicorn {server}"
        )
    return url


_STARTING = threading.Lock()
_servers: dict[str, tuple[subprocess.Popen, str]] = {}
"""Server -> its process and URL."""
_start_again_at: dict[str, float] = {}
"""Server that did not answer -> the time of `time.monotonic` from which it is started again."""
# The pipe closes when this process ends, whatever it ends of; a scheduler sends SIGTERM to every process of a run and
# means the controller. SIG_IGN would be inherited by programs that the server starts. The package's server raises
# whenever a client leaves, which uvicorn would tell at every episode.
_SERVE = """
import signal
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
import contextlib, os, sys, threading, uvicorn
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
class Server(uvicorn.Server):
    def capture_signals(self):
        return contextlib.nullcontext()
Server(uvicorn.Config(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]), log_level="critical")).run()
"""


_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Of this machine: a proxy of the environment's does not reach 127.0.0.1 here."""


def _started(server: str) -> tuple[subprocess.Popen, str]:
    """The process of a server that was started, and its URL; an empty one where it does not answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _SERVE, server, str(port)]
    process = subprocess.Popen(
        command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    atexit.register(process.kill)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with _WITHOUT_PROXY.open(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.2)
    process.kill()
    process.wait()
    return process, ""


def _environment() -> dict[str, str]:
    """Ours, with our `sys.path`: a server's module may lie beside the config."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


_SDKS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()


def _sdk() -> Any:
    """One client for all attempts of an event loop: a new one takes longer than a request."""
    import openai

    loop = asyncio.get_running_loop()
    if loop not in _SDKS:
        http_client = openai.DefaultAsyncHttpxClient(trust_env=False)  # the gateway is of this machine: no proxy
        _SDKS[loop] = openai.AsyncOpenAI(
            base_url="http://127.0.0.1", api_key="of the session", timeout=600, http_client=http_client
        )
    return _SDKS[loop]
