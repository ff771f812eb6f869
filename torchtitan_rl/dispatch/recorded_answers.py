"""What a recorded run answered to requests that had begun before a replay of it begins. The weights that sampled these
tokens are gone, so the replay takes them from the record."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan_rl.record.schedule import ScheduleEntry, request_key
from torchtitan_rl.types import Completion, Request

__all__ = ["RecordedAnswers"]

logger = logging.getLogger(__name__)


class RecordedAnswers:
    """Completions of a record, by stream and length of the prompt. What the engines admitted in the part of the
    schedule that is followed is sampled again, and has no answer here."""

    def __init__(self, engines: Sequence[Sequence[ScheduleEntry]], rollouts: Iterable[dict[str, Any]]) -> None:
        """`engines` has the commands of each engine that are followed; `rollouts` are records of the rollouts that the
        requests belong to."""
        self._sampled_again = Counter(
            key for _, key in {request for entries in engines for entry in entries for request in entry.requests}
        )
        self._has_warned = False
        self._turns: dict[tuple[int, int], deque[dict[str, Any]]] = defaultdict(deque)
        for rollout in rollouts:
            for turn in rollout["turns"] or ():
                if turn.get("seed") is not None:
                    self._turns[turn["seed"], turn["num_prompt_tokens"]].append(turn)

    def take(self, request: Request) -> Completion | None:
        """The recorded answer; None: the engines answer the request."""
        key = request_key(request)
        if self._sampled_again[key]:
            self._sampled_again[key] -= 1
            return None
        seed = None if request.params is None else request.params.seed
        turns = self._turns.get((seed, len(request.tokens))) if seed is not None else None
        if not turns:
            self._warn(request)
            return None
        turn = turns.popleft()
        return Completion(
            tokens=list(turn["tokens"]),
            logprobs=list(turn["logprobs"]),
            policy_versions=list(turn["policy_versions"]),
            finish_reason=turn["finish_reason"],
        )

    def _warn(self, request: Request) -> None:
        """Says once that the record does not have a request. Where the record ends early that is to be expected; where
        it does not, an engine waits for others in vain."""
        if not self._has_warned:
            self._has_warned = True
            problem = "neither in the schedule nor in the recorded rollouts; it waits for the end of the schedule"
            event = {"event": "replay_unrecorded"}
            logger.warning("replay: a request of %d tokens is %s", len(request.tokens), problem, extra=event)
