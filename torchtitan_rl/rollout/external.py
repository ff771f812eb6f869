"""Agents that others wrote, as a workflow: started for one attempt, they meet the policy at an OpenAI endpoint.

The agent is a function or a command. It gets a base URL and a key of its own, asks for completions as its author meant
to, and gives a reward. What the policy was given and said becomes the rollout. docs/gateway.md shows one of each kind.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchtitan_rl.record.tracing import span
from torchtitan_rl.rollout.agent import AgentFailed, CommandLimits, Endpoint, SessionLimits
from torchtitan_rl.rollout.agent_process import no_isolation, open_sandbox, run_command
from torchtitan_rl.rollout.ignored_parameters import check_ignored
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.rollout.sampler import SamplingFailed
from torchtitan_rl.tasks.family import SPLITS, TaskFamily
from torchtitan_rl.tasks.outcomes import is_cancellation, outcome_in_thread
from torchtitan_rl.tasks.reward_parts import PartNames
from torchtitan_rl.tasks.sandbox.config import SandboxConfig, check_each
from torchtitan_rl.types import A_REWARD, Rollout, Task, Turn, is_reward
from torchtitan_rl.types.branches import last_branch

__all__ = ["external", "External", "Endpoint", "SessionLimits", "CommandLimits", "AgentFailed", "Gateway", "Session"]

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
"""Seconds that a cancelled agent has to end; then it is left behind, and its session is closed."""


class Session(Protocol):
    """One attempt, as `serve.openai.sessions` keeps it."""

    endpoint: Endpoint
    reward: tuple[float, dict[str, float]] | None
    ended_by: str
    failure: SamplingFailed | None
    fault: str
    counts: dict[str, int]

    def turns(self) -> list[Turn]: ...


class Gateway(Protocol):
    """Opens sessions for agents; implemented by `serve.gateway.Gateway`."""

    def open_session(
        self,
        policy: Policy,
        *,
        seed: int,
        limits: SessionLimits,
        model: str,
        tool_parser: str,
        ignored: tuple[str, ...],
    ) -> Session: ...

    def end_session(self, session: Any) -> None: ...


@dataclass(kw_only=True)
class External:
    """A workflow that lets an agent play; made by `external`."""

    agent: Callable | list[str]
    timeout_s: float = 600.0
    """Seconds for one attempt; later: failure."""
    model: str = "policy"
    """The name of the policy, which the agent asks for."""
    tool_parser: str = ""
    """vLLM's parser of tool calls, such as `hermes`; empty: the policy's text is not read for calls."""
    ignored: tuple[str, ...] = ()
    """Parameters that the agent sends and its requests are answered without, such as `temperature` or
    `response_format`: names of `rollout.ignored_parameters.IGNORABLE`."""
    session: SessionLimits = field(default_factory=SessionLimits)
    command: CommandLimits = field(default_factory=CommandLimits)
    """Limits of an agent that is a command; without `sandbox`."""
    sandbox: SandboxConfig | Callable | None = None
    """The sandbox in which a command runs, with limits of its own; or a function `task -> SandboxConfig`, such as one
    that names the task's image. None: a process of the same user, with `command`."""
    shown: tuple[str, ...] = ()
    """Files of this machine that a container shows besides `read_only` of its sandbox; `installed` starts an agent with
    some."""
    judge: Callable | None = None
    """A command's reward: `async (task, sandbox) -> reward`, called once the command has ended, with the sandbox that
    it leaves behind. It counts before what the agent posts or writes. None: the agent or the task family judges."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of a command. The run's directory records them: no secrets."""
    imitated: Callable | None = None
    """The workflow that plays demonstrations in the supervised phase; None: the agent does, by way of the gateway."""
    with_answer: bool = False
    """Whether a command reads the task's answer too, for an agent that judges itself."""
    task_data: Callable | None = None
    """What a command reads of a task: `task -> data for JSON`. None: id and prompt, and as `with_answer` says."""
    _gateway: Gateway | None = field(default=None, init=False, repr=False, compare=False)
    _places: asyncio.Semaphore | None = field(default=None, init=False, repr=False, compare=False)
    _part_names: PartNames | None = field(default=None, init=False, repr=False, compare=False)

    def check_sandbox(self, family: TaskFamily | None = None) -> None:
        """Raises RuntimeError for a sandbox that this machine cannot run; a controller asks before it starts others.
        Of a sandbox for each task, `family` has the tasks; of an endless split the first is looked at."""
        if isinstance(self.sandbox, SandboxConfig):
            self.sandbox.check("external.sandbox")
        elif self.sandbox is not None and family is not None:
            counts = {split: family.num_tasks(split) for split in SPLITS}
            tasks = (family.task(split, i) for split, n in counts.items() for i in range(1 if n is None else n))
            check_each((self._sandbox_of(task) for task in tasks), "external.sandbox")

    def attach(self, gateway: Gateway) -> None:
        """The gateway on which sessions are opened from now on. A controller attaches its own. Raises RuntimeError for
        a command whose isolation is required and cannot be had, and for a sandbox that this machine cannot run."""
        self.check_sandbox()
        in_sandbox = self.sandbox is not None and getattr(self.sandbox, "kind", "") != "none"
        same_user = not in_sandbox and self.command.isolate != "off"
        if isinstance(self.agent, list) and same_user and (problem := no_isolation()):
            exposed = (
                f"commands cannot have namespaces of their own here ({problem}), so an agent may read the keys and "
                "answers of other attempts and write their rewards"
            )
            if self.command.isolate == "require":
                raise RuntimeError(
                    f"external(command=CommandLimits(isolate='require')): {exposed}; allow unprivileged user "
                    "namespaces on this machine, or set isolate='auto'"
                )
            logger.warning(
                "external(agent=%r): %s; allow unprivileged user namespaces, or set "
                "external(command=CommandLimits(isolate='off')) to accept it", self.agent[0], exposed,
            )  # fmt: skip
        self._gateway, self._places = gateway, asyncio.Semaphore(self.command.num_parallel)
        self._part_names = PartNames()

    async def __call__(self, task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
        """Plays a task once. Raises AgentFailed when the agent raises, is late, samples nothing or gives what is no
        reward (`types.is_reward`), SamplingFailed when the generators are at fault."""
        if self._gateway is None:
            raise RuntimeError("external: has no gateway; a controller opens one, elsewhere call attach(gateway)")
        session = self._gateway.open_session(
            policy, seed=seed, limits=self.session, model=self.model, tool_parser=self.tool_parser, ignored=self.ignored
        )
        agent_result, failed = None, None
        try:
            with span("wait for an agent"):
                agent_result, failed = await self._played(task, session)
        except AgentFailed as error:
            failed = error
        finally:
            self._gateway.end_session(session)
        if failed is not None and not (session.ended_by and not failed.breach):
            raise session.failure or failed
        limit = session.ended_by if failed else ""
        rollout = self._rollout(task, policy, session, agent_result, rollout_id, limit)
        try:
            self._part_names.admit(rollout.reward_parts)
        except ValueError as error:
            raise AgentFailed(f"agent: gave a reward for task {task.id!r} that is refused ({error})") from error
        return rollout

    async def _played(self, task: Task, session: Session) -> tuple[Any, AgentFailed | None]:
        """(the agent's result, which is its reward or None; how a command failed whose session stands at a limit)."""
        endpoint = session.endpoint
        if isinstance(self.agent, list):
            data = self._data(task) if self.task_data is None else self.task_data(task)
            config = self._sandbox_of(task)
            async with self._places, open_sandbox(config, self.command, endpoint) as sandbox:
                written, failed = await run_command(
                    sandbox, self.agent, endpoint, _json(task, data), self.env, self.timeout_s
                )
                if failed is not None and not session.ended_by:
                    raise failed
                if self.judge is not None:
                    written = await _judged(self.judge, task, sandbox, self.timeout_s)
                return written, failed
        work = asyncio.ensure_future(_called(self.agent, task, endpoint))
        try:
            done, _ = await asyncio.wait({work}, timeout=self.timeout_s)
        finally:
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=_GRACE_S)
                work.add_done_callback(_forget)
        if not done:
            raise AgentFailed(f"agent: was not done with task {task.id!r} within {self.timeout_s:g} s", breach=True)
        if work.cancelled():
            raise AgentFailed(f"agent: cancelled itself on task {task.id!r}")
        if (error := work.exception()) is not None:
            message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
            raise AgentFailed(f"agent: raised {message[:500]} for task {task.id!r}; mend it") from error
        return work.result(), None

    def _sandbox_of(self, task: Task) -> SandboxConfig | None:
        """The sandbox of a task. Raises ValueError where the function for it gives something else."""
        config = self.sandbox(task) if callable(self.sandbox) else self.sandbox
        if config is not None and not isinstance(config, SandboxConfig):
            raise ValueError(
                f"external: sandbox={self.sandbox!r}: gave {config!r} for task {task.id!r}; give a SandboxConfig"
            )
        if config is not None and config.is_container and self.shown:
            return replace(config, read_only=(*config.read_only, *self.shown))
        return config

    def _rollout(
        self, task: Task, policy: Policy, session: Session, agent_result: Any, rollout_id: str, limit: str
    ) -> Rollout:
        """The rollout of a session; `limit` is the one at which the agent failed, empty where it came to its end."""
        turns = session.turns()
        if session.fault:
            raise AgentFailed(f"{session.fault}, for task {task.id!r}")
        if not turns:
            raise session.failure or AgentFailed(f"agent: took no completion for task {task.id!r}; ask for one")
        result = _reward(agent_result, task)
        if self.judge is not None:  # nothing that the agent posted counts
            counted = result
        elif isinstance(self.agent, list):  # the result of a command is what its file holds
            counted = session.reward or result
        else:
            counted = result or session.reward
        reward, parts = counted or (0.0 if limit else None, {})
        branch = [turns[index] for index in last_branch(turns)]
        whole = [*branch[-1].prompt_tokens, *branch[-1].completion.tokens]
        episode_tokens = whole[len(branch[0].prompt_tokens) :]
        return Rollout(
            id=rollout_id,
            task=task,
            turns=turns,
            reward=reward,
            reward_parts=dict(parts),
            text=policy.tokenizer.decode(episode_tokens, skip_special_tokens=True),
            end_reason=limit or "done",
            counts=dict(session.counts),
        )

    def _data(self, task: Task) -> dict[str, Any]:
        return {"id": task.id, "prompt": task.prompt} | ({"answer": task.answer} if self.with_answer else {})


def external(agent: Callable | list[str], **settings: Any) -> External:
    """A workflow that plays tasks with an agent; `settings` are the fields of `External`.

    `agent` is called as `agent(task, endpoint)`: an async function on the controller's event loop, a plain function in
    a thread. Or it is a command, which runs in a directory and a process group of its own, with limits. What it returns
    is the reward: a number, `(number, {"part": number})`, or None where it posts a reward, writes one to the file
    `REWARD_FILE`, or leaves judging to the task family.
    Raises ValueError for settings without meaning.
    """
    if isinstance(agent, (list, tuple)):
        agent = [str(word) for word in agent]
        if not agent:
            raise ValueError("external: agent=[]: is no command; give a program and its arguments")
    elif not callable(agent):
        raise ValueError(f"external: agent={agent!r}: is neither a function nor a list of words; give one of them")
    agent_workflow = External(agent=agent, **settings)
    if not agent_workflow.timeout_s > 0:
        raise ValueError(f"external: timeout_s={agent_workflow.timeout_s}: must be above 0")
    if agent_workflow.command.isolate not in ("auto", "require", "off"):
        raise ValueError(
            f"external: command.isolate={agent_workflow.command.isolate!r}: there is no such way; use auto, require or "
            "off"
        )
    if not isinstance(agent, list) and (agent_workflow.sandbox is not None or agent_workflow.judge is not None):
        raise ValueError("external: sandbox, judge: are for an agent that is a command; give a list of words")
    if agent_workflow.judge is not None and not inspect.iscoroutinefunction(agent_workflow.judge):
        raise ValueError(
            f"external: judge={agent_workflow.judge!r}: is no async function of (task, sandbox); write one"
        )
    if not agent_workflow.model:
        raise ValueError("external: model='': agents ask for a name; give one")
    check_ignored(agent_workflow.ignored, "external: ignored")
    return agent_workflow


async def _called(agent: Callable, task: Task, endpoint: Endpoint) -> Any:
    try:
        if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(type(agent).__call__):
            return await agent(task, endpoint)
        value, error = await outcome_in_thread(agent, task, endpoint)
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, StopIteration) as error:  # the one would end the event loop, the other cannot leave a coroutine
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _judged(judge: Callable, task: Task, sandbox: Any, timeout_s: float) -> Any:
    """What the judge says of a sandbox. Raises AgentFailed where it raises or is late."""
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await judge(task, sandbox)
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        if is_cancellation(error):
            raise
        if scope.expired() and isinstance(error, TimeoutError):
            message = f"judge: was not done with task {task.id!r} within {timeout_s:g} s"
            raise AgentFailed(message, breach=True) from None
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise AgentFailed(f"judge: raised {message[:500]} for task {task.id!r}; mend it", breach=True) from error


def _forget(work: asyncio.Future) -> None:
    """Takes the exception of an agent that nobody waits for any more."""
    if not work.cancelled():
        work.exception()


def _json(task: Task, data: Any) -> str:
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"task={task.id!r}: cannot be written as JSON for a command ({error}); give external(task_data=...) a "
            "function that makes plain data of a task"
        ) from error


def _reward(agent_result: Any, task: Task) -> tuple[float, dict[str, float]] | None:
    """(reward, its parts) from the result of an agent; None where the result is None. Raises AgentFailed for a result
    that is no reward."""
    if agent_result is None:
        return None
    number, parts = agent_result if isinstance(agent_result, tuple) and len(agent_result) == 2 else (agent_result, {})
    with suppress(ValueError, RuntimeError):  # an array or a tensor of several numbers, which is refused below
        number = number.item() if hasattr(number, "item") else number
    if not isinstance(parts, dict) or not all(map(is_reward, [number, *parts.values()])):
        raise AgentFailed(
            f"agent: gave reward {repr(agent_result)[:80]} for task {task.id!r}; give {A_REWARD}, or "
            "(number, {'part': number})"
        )
    return float(number), {str(name): float(value) for name, value in parts.items()}
