"""The contract of an agent: the endpoint where it samples, the limits on its requests and its command, and its
failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Endpoint", "SessionLimits", "CommandLimits", "AgentFailed"]


class AgentFailed(RuntimeError):
    """An agent raised, was late, gave no reward that counts, or sampled nothing. `breach`: it passed a limit of its
    own, and is no rollout whatever its session says."""

    def __init__(self, message: str, *, breach: bool = False) -> None:
        super().__init__(message)
        self.breach = breach


@dataclass(kw_only=True, slots=True, frozen=True)
class Endpoint:
    """Where an agent meets the policy."""

    base_url: str
    """What OpenAI's SDKs take as `base_url`: `http://127.0.0.1:PORT/sessions/ID/v1`."""
    api_key: str
    """The session's secret."""
    model: str
    """The name to ask for."""
    session_id: str
    seed: int
    """The attempt's seed, for randomness of the agent's own."""
    training: bool
    """Whether the rollout trains; False in evaluations."""
    app: Any = field(default=None, repr=False, compare=False)
    """The gateway as an ASGI application, for a client in this process that does without sockets, by the
    `ASGITransport(app=endpoint.app)` of httpx or httpx2; a command gets none."""

    @property
    def session_url(self) -> str:
        """`POST session_url/reward` takes a reward; Anthropic's SDKs take it as `base_url`."""
        return self.base_url.removesuffix("/v1")


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionLimits:
    """How much one attempt may ask for; 0: no limit. An agent that fails at `max_turns` or `max_tokens` has ended by
    that limit and keeps its reward; an agent that is refused and goes on has not."""

    max_turns: int = 64
    """Completions in all."""
    max_tokens: int = 0
    """Sampled tokens after which no completion is begun."""
    max_parallel: int = 16
    """Completions that are awaited at once."""
    requests_per_s: float = 0.0
    """Requests per second, after a burst of as many."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CommandLimits:
    """What one command may use. The kernel holds memory and the size of a file; the rest is looked at four times a
    second, and a command over a limit is killed."""

    memory_gib: float = 4.0
    """Address space of each process."""
    max_output_mib: float = 1.0
    """Standard output and error together."""
    max_disk_mib: float = 1024.0
    """Files in the command's directory, and each file."""
    max_processes: int = 64
    """Processes at once."""
    num_parallel: int = 16
    """Commands of a run at once; others wait, and their time does not run."""
    isolate: str = "auto"
    """Whether a command has Linux namespaces of its own, in which it sees neither processes nor files of other
    attempts: `auto`, where the machine allows them, with a warning where it does not; `require`, or the run does not
    start; `off`, for a command that needs sudo or starts containers without root."""
