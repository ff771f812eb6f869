"""Environments of the `verifiers` package (0.4): their tasks as a family, their rollouts as an agent.

https://github.com/PrimeIntellect-ai/verifiers. The environment runs as its author wrote it and meets the policy at the
gateway's endpoint (rollout/external.py). docs/environments.md shows a run and says what does not fit.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["Verifiers"]

HARNESS = "torchtitan_rl"
"""The name by which verifiers finds `verifiers_harness.InProcess`."""

_IMPORT_S = 60
"""Seconds in which a module of a tool server has to be imported."""


class Verifiers:
    """The tasks of one verifiers environment with one agent. The task set is cut into train, validation and test.

    Raises ValueError for an environment of several agents and for a task set that is endless or too small,
    RuntimeError when verifiers is not installed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        env: dict[str, Any]
        """The `[env]` block of the package's own configs, such as `{"taskset": {"id": "gsm8k-v1"}}`. An agent without a
        harness, or without a runtime, gets one of this machine: `verifiers_harness.InProcess`, and `subprocess`."""
        num_validation: int = 64
        """Tasks kept for validation."""
        num_test: int = 128
        """Tasks kept for the test."""
        seed: int = 0
        """Seed that chooses the tasks for validation and test."""
        demonstrate: Callable[[Any, random.Random], str] | None = None
        """Gives a reply to imitate: `(the environment's TaskData, generator of random numbers) -> text`."""

        def build(self) -> Verifiers:
            return Verifiers(self)

    name = "verifiers"

    def __init__(self, config: Verifiers.Config) -> None:
        self.config = config
        self.rows = _loaded(json.dumps(config.env)).rows
        order = list(range(len(self.rows)))
        random.Random(stable_hash(config.seed, "verifiers")).shuffle(order)
        held_out = config.num_validation + config.num_test
        if held_out >= len(order):
            raise ValueError(
                f"verifiers.num_validation={config.num_validation}, num_test={config.num_test}: leave nothing to train "
                f"on of {len(order)} tasks; lower them"
            )
        self._order = {
            "validation": order[: config.num_validation],
            "test": order[config.num_validation : held_out],
            "train": order[held_out:],
        }

    @staticmethod
    def agent(env: dict[str, Any]) -> Callable:
        """What `external` takes: plays one episode of the environment, gives its reward, and each of its rewards and
        metrics by name."""
        return functools.partial(play, env=env)

    def num_tasks(self, split: str) -> int:
        check_split(split)
        return len(self._order[split])

    def task(self, split: str, index: int) -> Task:
        """`answer` is the environment's task as plain data. Only train tasks carry a demonstration."""
        check_index(self, split, index)
        data = self.rows[self._order[split][index]].data
        demonstration = None
        if split == "train" and self.config.demonstrate is not None:
            rng = random.Random(stable_hash(self.config.seed, split, index))
            demonstration = self.config.demonstrate(data, rng)
        return Task(
            id=f"{self.name}/{split}/{index}",
            prompt=_messages(data),
            answer=data.model_dump(mode="json"),
            demonstration=demonstration,
        )

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        raise RuntimeError(
            "verifiers: an environment judges its own rollouts; set algorithm.workflow=external(Verifiers.agent(env))"
        )


async def play(task: Task, endpoint: Any, *, env: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """One episode: (reward, its rewards and metrics by name). Raises RuntimeError for an episode that failed."""
    import verifiers.v1 as vf

    loaded = _loaded(json.dumps(env))
    # Clients of the package read keys from the environment only. It keeps names with API_KEY from programs it starts.
    variable = f"SESSION_API_KEY_{endpoint.session_id}"
    os.environ[variable] = endpoint.api_key
    try:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        context = vf.ModelContext(model=endpoint.model, client=client)
        episode = await loaded.env.run_episode(loaded.rows[task.answer["idx"]], context)
    finally:
        os.environ.pop(variable, None)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}" if errors else "verifiers: it failed")
    (trace,) = episode.traces
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return trace.reward, parts | {name: value for name, value in trace.metrics.items() if value is not None}


@dataclass(slots=True)
class _Loaded:
    env: Any
    rows: list[Any]
    """The environment's tasks; `data.idx` is a task's place here."""


@functools.lru_cache(maxsize=8)
def _loaded(env: str) -> _Loaded:
    try:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields
    except ImportError as error:
        raise RuntimeError(
            f"verifiers: cannot be imported ({error}); install it with bash scripts/setup.sh verifiers"
        ) from error
    from torchtitan_rl.tasks import verifiers_harness

    sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", verifiers_harness)
    config = vf.resolve_env_config(json.loads(env))
    agents = agent_config_fields(config)
    if len(agents) != 1:
        raise ValueError(
            f"verifiers.env={env}: has {len(agents)} agents ({', '.join(agents)}), and one rollout has one reward; use "
            "an environment with one"
        )
    ((name, agent),) = agents.items()
    ours: dict[str, Any] = {}
    if agent.harness is None and vf.default_harness_id(config.taskset.id) == "bash":
        ours["harness"] = vf.HarnessConfig(id=HARNESS)
    if "runtime" not in agent.model_fields_set:
        ours["runtime"] = vf.SubprocessConfig()
    loaded_environment = vf.load_environment(config.model_copy(update={name: agent.model_copy(update=ours)}))
    if not loaded_environment.taskset.bounded:
        raise ValueError(f"verifiers.env={env}: its task set is endless; use one with an end")
    if loaded_environment.taskset.toolsets(loaded_environment.taskset.config):
        raise ValueError(f"verifiers.env={env}: its tasks share tool servers; use one whose tasks bring their own")
    rows = list(loaded_environment.taskset)
    for task in {type(row): row for row in rows}.values():
        for toolset in task.toolsets(task.config):
            if toolset.config.url is None and toolset.config.runtime.type == "subprocess":
                _make_importable(type(toolset))
    return _Loaded(loaded_environment, rows)


def _make_importable(toolset: type) -> None:
    """Sees to it that `python -m MODULE`, which is how the package starts a tool server, finds the toolset's module: a
    directory that only this process has on its path goes into PYTHONPATH, behind what is there.

    Raises ValueError with the import's own words where it fails: the package would wait three minutes for the server's
    port."""
    module = toolset.__module__
    error = _import_error(module)
    file = getattr(sys.modules.get(module), "__file__", None)
    if error and file is not None:
        parents = len(module.split(".")) - (1 if Path(file).name != "__init__.py" else 0)
        root = str(Path(file).resolve().parents[parents])
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if root not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), root])
            error = _import_error(module)
    if error:
        raise ValueError(
            f"verifiers: the tool server {toolset.__qualname__} is of module {module!r}, which a process of its own "
            f"cannot import ({error}); install the module, or put its directory into PYTHONPATH"
        )


def _import_error(module: str) -> str:
    """Why a new process cannot import a module; empty: it can."""
    command = [sys.executable, "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it is not imported within {_IMPORT_S} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"status {done.returncode}"


def _messages(data: Any) -> list[dict[str, Any]]:
    """The first messages to the agent, as far as the task has them."""
    from verifiers.v1.dialects.chat import message_to_wire

    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt or [])]
