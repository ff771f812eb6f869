"""An agent that calls the gateway in every dialect, asks again, goes away and branches off; and the comparison of what
a run's records say with what the engine answered."""

import asyncio
import contextlib
import copy
import random
from collections import Counter

import anthropic
import openai

from tests.integration.dialect_clients import CLIENTS, Settings

RETRIED, DROPPED, BRANCHED = 0.125, 0.115, 0.048
"""Shares of steps. A step that branches makes two calls, and nothing is asked again before an answer: each kind is
about a tenth of the calls."""
_ROOM = 200
"""Tokens of a prompt after which another conversation begins."""


class Caller:
    """An agent for `external`: `num_calls` calls of a session, or one where nothing trains."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.counts: Counter[str] = Counter()
        """Calls of sessions that train: by kind (`plain`, `retry`, `dropped`, `branch`), by dialect, and `read`, whose
        answer the client has read to its end."""

    async def __call__(self, task, endpoint) -> float:
        draws = random.Random(endpoint.seed)
        settings = {"api_key": endpoint.api_key, "max_retries": 0, "timeout": 120}
        async with (
            openai.AsyncOpenAI(base_url=endpoint.base_url, **settings) as of_openai,
            anthropic.AsyncAnthropic(base_url=endpoint.session_url, **settings) as of_anthropic,
        ):
            left, client, prompt_tokens = self.num_calls if endpoint.training else 1, None, 0
            while left > 0:
                if client is None or prompt_tokens > _ROOM:
                    kind, stream = draws.choice(list(CLIENTS)), draws.random() < 0.5
                    client = CLIENTS[kind](of_openai, of_anthropic, Settings(max_tokens=8), stream)
                    client.kind, answered = kind, False
                    client.say("1+2")
                calls, prompt_tokens, client = await self._step(client, answered, draws, endpoint.training)
                left, answered = left - calls, answered or prompt_tokens > 0
        return draws.random()

    async def _step(self, client, answered: bool, draws: random.Random, counted: bool):
        """(calls, tokens of the last prompt or 0, the client that goes on)."""
        draw = draws.random() if counted else 1.0  # an evaluation asks once, and has to read the answer
        if draw < DROPPED:
            return 1, await self._dropped(client, draws.random() * 0.05, counted), client
        if draw < DROPPED + BRANCHED:
            self._say(client, answered)
            other = forked(client)
            other.say("and else?")
            replies = await asyncio.gather(client.ask(), other.ask())
            self._count(client, "branch", counted, calls=2)
            chosen = draws.randrange(2)
            return 2, replies[chosen].usage[0], (client, other)[chosen]
        if draw < DROPPED + BRANCHED + RETRIED and answered:
            client.forget()
            reply = await client.ask()
            self._count(client, "retry", counted)
            return 1, reply.usage[0], client
        self._say(client, answered)
        reply = await client.ask()
        self._count(client, "plain", counted)
        return 1, reply.usage[0], client

    def _say(self, client, answered: bool) -> None:
        if answered:
            client.say("go on")

    async def _dropped(self, client, after_s: float, counted: bool) -> int:
        """Closes the connection of a stream after some time. Its answer may have come by then."""
        gone = forked(client)
        gone.stream = True
        gone.say("never mind")
        asked = asyncio.ensure_future(gone.ask())
        await asyncio.wait({asked}, timeout=after_s)
        read = asked.done()
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
        self._count(client, "dropped", counted, read=int(read))
        return 0

    def _count(self, client, kind: str, counted: bool, *, calls: int = 1, read: int | None = None) -> None:
        if counted:
            self.counts += Counter({kind: calls, client.kind: calls, "calls": calls})
            self.counts["read"] += calls if read is None else read


def forked(client):
    """A client with the same conversation so far."""
    other = copy.copy(client)
    for name in ("messages", "items", "previous", "num_stored"):
        if hasattr(client, name):
            setattr(other, name, list(getattr(client, name)))
    return other


def recorded_turns(records) -> list[tuple]:
    """(prompt tokens, sampled tokens, their log-probabilities, their versions) of each turn in the records of rollouts.
    Each turn is in one training sequence, with the tokens that the turn has."""
    turns = []
    for record in records:
        places = sorted((place, number) for number, s in enumerate(record["sequences"]) for place in s["turns"])
        assert [place[0] for place, _ in places] == list(range(len(record["turns"]))), record["rollout_id"]
        for ((index, first, count), number), turn in zip(places, record["turns"], strict=True):
            sequence = record["sequences"][number]
            assert sequence["target_tokens"][first : first + count] == turn["tokens"], (record["rollout_id"], index)
            assert all(sequence["loss_mask"][first : first + count]), (record["rollout_id"], index)
            said = (turn["tokens"], turn["logprobs"], turn["policy_versions"])
            turns.append((tuple(sequence["tokens"][: first + 1]), *map(tuple, said)))
        trained = sum(sum(sequence["loss_mask"]) for sequence in record["sequences"])
        assert trained == sum(len(turn["tokens"]) for turn in record["turns"]), record["rollout_id"]
    return turns


def check_records(records, answered: list[tuple], counts: Counter) -> dict[str, int]:
    """Compares turns of records with what the engine answered, in the form of `recorded_turns`. Every recorded turn is
    an answer of the engine, no answer is recorded twice, and every answer that a client has read is recorded."""
    turns = recorded_turns(records)
    unlike = Counter(turns) - Counter(answered)
    assert not unlike, f"{unlike.total()} of {len(turns)} recorded turns are no answers of the engine"
    assert counts["read"] <= len(turns) <= counts["read"] + counts["dropped"]
    return {"calls": counts["calls"], "turns": len(turns), "tokens": sum(len(turn[1]) for turn in turns)}
