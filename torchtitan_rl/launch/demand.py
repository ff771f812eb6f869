"""How many generator replicas the requests of a run would fill, and the rule that follows it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.dispatch.role_mesh import describe
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.launch.replicas import Replicas

__all__ = ["Demand", "scaled_by_demand"]

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_LOOKS = 60
"""A replica takes most of a minute to start: demand that is gone sooner is none."""
_FULL = 0.75
"""A replica leaves only where the others would be at most so full: otherwise it would soon be wanted again."""


class Demand:
    """The mean number of unanswered requests over the last looks, against the sequences that a replica decodes at once.

    Looks at which nothing was asked for do not count. Without a lag the generators stand still while a batch trains;
    more of them would shorten the other part of the step.
    """

    def __init__(self, places: int, *, least: int, most: int, looks: int = _LOOKS) -> None:
        """`places` is `generator.max_num_seqs`; the number of replicas stays from `least` to `most`."""
        self._places, self._least, self._most = places, least, most
        self._unanswered: deque[int] = deque(maxlen=looks)

    def look(self, unanswered: int) -> None:
        """Notes the unanswered requests of all replicas at this moment."""
        if unanswered:
            self._unanswered.append(unanswered)

    def replicas(self, now: int) -> int:
        """The number of replicas to have instead of `now`. More where, on average, requests wait for a place; fewer
        where the others would have places to spare; `now` until there have been enough looks since `forget`."""
        if len(self._unanswered) < (self._unanswered.maxlen or 0):
            return now
        filled = sum(self._unanswered) / len(self._unanswered) / self._places
        if filled > now:
            return max(now, min(self._most, math.ceil(filled)))
        return min(now, max(self._least, math.ceil(filled / _FULL)))

    def forget(self) -> None:
        """Looks from before a change say nothing about the replicas after it."""
        self._unanswered.clear()


@asynccontextmanager
async def scaled_by_demand(
    replicas: Replicas | None, client: SamplingClient, generator: GeneratorConfig, *, looks: int = _LOOKS
) -> AsyncIterator[None]:
    """Replicas join and leave by `Demand`, between `generator.num_replicas` and `generator.max_replicas`, as long as
    the block runs. Nothing happens where `max_replicas` is None. Raises ValueError for a run whose number is fixed."""
    if generator.max_replicas is None:
        yield
        return
    if replicas is None:
        raise ValueError(
            f"generator.max_replicas={generator.max_replicas}: the number of replicas is fixed in this run; use "
            "--backend actors, or leave max_replicas out"
        )
    demand = Demand(generator.max_num_seqs, least=generator.num_replicas, most=generator.max_replicas, looks=looks)
    following = asyncio.ensure_future(_follow(demand, replicas, client))
    try:
        yield
    finally:
        following.cancel()


async def _follow(demand: Demand, replicas: Replicas, client: SamplingClient) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        demand.look(sum(client.in_flight()))
        now = replicas.number
        if (number := demand.replicas(now)) == now:
            continue
        try:
            await replicas.scale(number)
        except Exception as error:  # tried again after as many looks
            foreseen = isinstance(error, (RuntimeError, ValueError))
            reason = str(error) if foreseen else describe(error)
            text = "replicas=%d: are not %d, as the requests would fill: %s"
            logger.warning(text, replicas.number, number, reason, exc_info=not foreseen)
        demand.forget()
