"""Generator replicas that take virtual time: the methods of a `RoleMesh` over a pretended engine.

Tokens are a hash of the request's seed, the token's place and the weights that the engine holds when it samples the
token. The log-probability of every token is the number of its request, so that the trainer can tell where each token of
its data comes from.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchtitan_rl.actors.operations import Operation
from torchtitan_rl.dispatch.role_mesh import NoAnswer, ProcessDied, WorkerLost
from torchtitan_rl.types import Completion, Request
from torchtitan_rl.weights.layout import Manifest

if TYPE_CHECKING:
    from tests.simulation.world import Asked, World

__all__ = ["FakeReplica", "logprob_of", "number_of"]

_NOTICED_S = 1.0  # from a process's death to the failure of the calls that wait for the process
_TOGETHER_S = 0.01  # answers of this long travel together
_NUM_TOKENS = 60  # of `tasks.Tokenizer`, without the end of sequence


def logprob_of(number: int) -> float:
    """The log-probability of the tokens of request `number`: exact in float32 for 16 million requests."""
    return -(number + 1) / 1024


def number_of(logprob: float) -> int:
    """The inverse of `logprob_of`."""
    return round(-logprob * 1024) - 1


@dataclass(slots=True)
class _Ticket:
    """A round of requests, which are answered one by one."""

    poll: asyncio.Future | None = None
    """The call that waits for the next answers."""
    done: list[tuple[int, Asked | None]] = field(default_factory=list)
    """What no call has fetched yet."""
    in_engine: dict[int, tuple[int, Asked]] = field(default_factory=dict)
    """Index of each request that the engine has -> its `Request.number`, and the request."""


class FakeReplica:
    """One replica. `die` and `hang` are the faults of its process; the world says which of its calls fail."""

    num_ranks = 1

    def __init__(self, world: World, role: str) -> None:
        self.world, self.role, self.timeout_s = world, role, world.call_timeout_s
        self.dead = False
        self.hung_until = 0.0
        self.held: list[tuple[float, int, int]] = []
        """(time, version, weights) of each load, in order."""
        self.staged: dict[int, int] = {}
        """Version -> weights that were fetched and not loaded yet."""
        self._calls: dict[asyncio.Future, tuple[str, asyncio.TimerHandle]] = {}
        """Call without an answer -> its name, and what ends it at its deadline."""
        self._tickets: dict[int, _Ticket] = {}

    # What a mesh offers.

    def call_leader(self, operation: Operation, *args: Any, timeout_s: float | None = None) -> asyncio.Future:
        loop = self.world.loop
        answer, name = loop.create_future(), f"{self.role}-0.{operation.__name__}"
        if self.dead:
            loop.call_later(_NOTICED_S, _fail, answer, ProcessDied(f"{name}: its process died; see its log"))
            return answer
        late = NoAnswer(f"{name}: no answer within {timeout_s or self.timeout_s:g} s; look at its log")
        self._calls[answer] = name, loop.call_later(timeout_s or self.timeout_s, self._late, answer, late)
        getattr(self, operation.__name__)(answer, *args)
        return answer

    call_all = call_leader

    def call_rank(self, rank: int, operation: Operation, *args: Any, timeout_s: float | None = None) -> asyncio.Future:
        return self.call_leader(operation, *args, timeout_s=timeout_s)

    # Faults of the process.

    def die(self) -> None:
        """Ends the process: what was under way is lost, calls that wait fail a second later."""
        self.dead = True
        for answer, (name, _) in self._calls.items():
            error = ProcessDied(f"{name}: its process died; see its log")
            self.world.loop.call_later(_NOTICED_S, _fail, answer, error)

    def hang(self, seconds: float) -> None:
        """Gives no answer for so long; what was asked meanwhile is answered late."""
        self.hung_until = self.world.loop.time() + seconds

    # Endpoints.

    def sample(self, answer: asyncio.Future, ticket: int, requests: list[Request]) -> None:
        if requests:
            self._tickets[ticket] = _Ticket()
        round_ = self._tickets[ticket]
        round_.poll = answer
        for index, request in enumerate(requests):
            asked = self.world.asked(request, self)
            round_.in_engine[index] = request.number, asked
            self._after(0.01 if asked.refused else asked.seconds, self._complete, round_, index, asked)
        if round_.done:
            self._after(_TOGETHER_S, self._deliver, round_)

    def cancel(self, answer: asyncio.Future, numbers: list[int]) -> None:
        def cancelled() -> None:
            for round_ in self._tickets.values():
                for index, (number, asked) in list(round_.in_engine.items()):
                    if number in numbers:
                        self.world.cancelled(asked)
                        self._complete(round_, index, None)

        self._after(0.01, self._answer, answer, cancelled)

    def fetch(self, answer: asyncio.Future, manifest: Manifest, verify: bool) -> None:
        def fetched() -> None:
            self.world.may_fail("fetch", self)
            self.staged[manifest.version] = self.world.store.weights_of(manifest.version)

        self._after(self.world.between(0.1, 1.5), self._answer, answer, fetched)

    def load(self, answer: asyncio.Future, version: int) -> None:
        seconds = self.world.between(0.05, 0.4)

        def loaded() -> float:
            self.world.may_fail("load", self)
            if version not in self.staged:
                self.world.log.not_staged.append(f"{self.role}: version {version}")
            self.held.append((self.world.loop.time(), version, self.staged.pop(version)))
            return seconds

        self._after(seconds, self._answer, answer, loaded)

    def probe(self, answer: asyncio.Future) -> None:
        self._after(0.01, self._answer, answer, lambda: None)

    def abort(self, answer: asyncio.Future) -> None:
        self._after(0.01, self._answer, answer, self.die)

    # The engine.

    def _complete(self, round_: _Ticket, index: int, asked: Asked | None) -> None:
        """`asked` None: the request was cancelled."""
        if round_.in_engine.pop(index, None) is None:
            return  # it was cancelled before
        round_.done.append((index, asked))
        if len(round_.done) == 1 and round_.poll is not None:
            self._after(_TOGETHER_S, self._deliver, round_)

    def _deliver(self, round_: _Ticket) -> None:
        poll, round_.poll = round_.poll, None
        if poll is None or poll.done():
            return
        done, round_.done = round_.done, []
        for asked in filter(None, (asked for _, asked in done)):
            self.world.answered(asked)
        self._settled(poll)
        poll.set_result([(index, self._completion(asked)) for index, asked in done])

    def _completion(self, asked: Asked | None) -> Completion | ValueError | None:
        if asked is None:
            return None
        if asked.refused:
            return ValueError("prompt: holds a token that the engine refuses")
        pace, tokens, versions = asked.seconds / asked.num_tokens, [], []
        for place in range(asked.num_tokens):
            due = asked.began + (place + 1) * pace
            _, version, weights = next((load for load in reversed(self.held) if load[0] <= due), (0.0, -1, -1))
            tokens.append(zlib.crc32(f"{asked.stream}/{place}/{weights}".encode()) % _NUM_TOKENS)
            versions.append(version)
        asked.tokens, asked.versions = tokens, versions
        return Completion(
            tokens=list(tokens),
            logprobs=[logprob_of(asked.number)] * len(tokens),
            policy_versions=list(versions),
            finish_reason="length" if asked.cut_off else "stop",
        )

    def _after(self, seconds: float, work: Callable, *args: Any) -> None:
        """Calls `work(*args)` after so many seconds of a process that neither dies nor hangs."""
        self.world.loop.call_later(seconds, self._wake, work, args)

    def _wake(self, work: Callable, args: tuple) -> None:
        if self.dead:
            return
        left = self.hung_until - self.world.loop.time()
        self._after(left, work, *args) if left > 0 else work(*args)

    def _answer(self, answer: asyncio.Future, work: Callable[[], Any]) -> None:
        try:
            result = work()
        except (RuntimeError, KeyError) as error:
            kind = type(error) if isinstance(error, WorkerLost) else RuntimeError
            self._settled(answer)
            _fail(answer, kind(f"{self.role}-0: {error}"))
        else:
            self._settled(answer)
            if not answer.done():
                answer.set_result(result)

    def _late(self, answer: asyncio.Future, error: Exception) -> None:
        self._settled(answer)
        _fail(answer, error)

    def _settled(self, answer: asyncio.Future) -> None:
        """The call has its answer: it has no deadline any more."""
        if call := self._calls.pop(answer, None):
            call[1].cancel()


def _fail(answer: asyncio.Future, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
