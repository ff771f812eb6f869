"""Which replica serves which request. Bookkeeping only: it calls nobody, and the same history routes the same way."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence

__all__ = ["Router"]

_BLOCK_TOKENS = 16  # hashed at once
_MAX_PROMPTS = 16384  # remembered, over all replicas
_STICKY_REQUESTS = 32  # one engine decodes so many together at little more than the price of one
_STICKY_SHARE = 1.5


class Router:
    """Load and sticky prefixes of several replicas, by index; `SamplingClient` knows which of them are healthy.

    A request goes to the first of these that is healthy and serves its policy version:

    1. the replica that was last sent its prompt, or failing that the longest prompt which it extends (a group, the next
       turn), since it loaded weights: its prefix cache holds them. But not once that replica has as many requests as
       1.5 x its share of all of them, and at least 32: then sharing a prefix costs more in waiting than it saves;
    2. the one with the fewest requests, the first of equals. Requests, not tokens: an engine decodes its sequences
       side by side, and how long a completion gets is not known before.
    """

    def __init__(self, num_replicas: int):
        self.loads = [0] * num_replicas
        """Requests sent to each replica and not answered yet."""
        self._named = [Counter() for _ in range(num_replicas)]
        """Those of them that name a policy version, by version."""
        self._num_loads = [0] * num_replicas
        self._homes: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = OrderedDict()
        """(hash of a prompt's whole blocks, the tokens after them) -> (replica, its number of loads), oldest first."""
        self._endings: Counter[int] = Counter()
        """How many of `_homes` have a hash: most blocks of a prompt end none and need not be looked at closely."""

    # What happens to replicas.

    def loaded(self, index: int) -> None:
        """Weights were loaded: its caches are empty."""
        self._num_loads[index] += 1

    def finished(self, index: int, num_requests: int, version: int | None) -> None:
        """Requests that were routed there have been answered, or never will be."""
        self.loads[index] -= num_requests
        if version is not None:
            self._named[index][version] -= num_requests
            if not self._named[index][version]:
                del self._named[index][version]

    # Routing.

    def route(
        self,
        prompts: Sequence[list[int]],
        version: int | None,
        *,
        healthy: Sequence[int],
        held: Sequence[int | None],
        newest: int | None,
    ) -> list[int]:
        """A replica for each prompt, in order; counts them as sent. `healthy` has at least one replica, `held` the
        version that each has loaded, healthy or not; `newest` is the one that serves requests without a version."""
        among = self._serving(version, healthy, held, newest, len(prompts))
        share = (sum(self.loads[i] for i in among) + len(prompts)) / len(among)
        limit = max(_STICKY_REQUESTS, math.ceil(_STICKY_SHARE * share))
        chosen, previous, hashes = [], None, []
        for prompt in prompts:
            if len(among) == 1:
                index = among[0]
            else:
                if prompt != previous:  # a group's prompts follow each other: hash them once
                    previous, hashes = prompt, _block_hashes(prompt)
                index = self._home(prompt, hashes)
                if index not in among or self.loads[index] >= limit:
                    index = min(among, key=lambda i: (self.loads[i], i))
                self._remember(prompt, hashes, index)
            self.loads[index] += 1
            if version is not None:
                self._named[index][version] += 1
            chosen.append(index)
        return chosen

    def _serving(
        self,
        version: int | None,
        healthy: Sequence[int],
        held: Sequence[int | None],
        newest: int | None,
        num_requests: int,
    ) -> list[int]:
        """Healthy replicas that serve a version without changing weights, and as many idle ones, which will, as make a
        full engine's worth of the requests worth a change; at least the least loaded one.

        Without a version: those with no request pinned to another version than the newest, or all.
        """
        if version is None:
            return [i for i in healthy if all(v == newest for v in self._named[i])] or list(healthy)
        # One that is about to serve it counts: the next requests of that version need not make another one change.
        serving = [i for i in healthy if held[i] == version or version in self._named[i]]
        idle = [i for i in healthy if i not in serving and not self.loads[i]]
        serving += idle[: max(0, num_requests // _STICKY_REQUESTS - len(serving))]
        return sorted(serving) or [min(healthy, key=lambda i: (self.loads[i], i))]

    def _home(self, prompt: list[int], hashes: list[int]) -> int | None:
        """The replica that holds the longest remembered prompt which this one equals or extends."""
        for num_blocks in reversed(range(len(hashes))):
            if not self._endings[hashes[num_blocks]]:
                continue
            rest = tuple(prompt[num_blocks * _BLOCK_TOKENS :][: _BLOCK_TOKENS - 1])
            for length in reversed(range(len(rest) + 1)):
                index, num_loads = self._homes.get((hashes[num_blocks], rest[:length]), (None, 0))
                if index is not None and num_loads == self._num_loads[index]:
                    return index
        return None

    def _remember(self, prompt: list[int], hashes: list[int], index: int) -> None:
        key = hashes[-1], tuple(prompt[(len(hashes) - 1) * _BLOCK_TOKENS :])
        if key not in self._homes:
            self._endings[key[0]] += 1
        self._homes[key] = index, self._num_loads[index]
        self._homes.move_to_end(key)
        if len(self._homes) > _MAX_PROMPTS:
            (ending, _), _ = self._homes.popitem(last=False)
            self._endings[ending] -= 1
            if not self._endings[ending]:
                del self._endings[ending]


def _block_hashes(prompt: list[int]) -> list[int]:
    """Hash of the first 0, 1, 2, ... whole blocks, each computed from the one before."""
    hashes = [0]
    for start in range(0, len(prompt) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        hashes.append(hash((hashes[-1], *prompt[start : start + _BLOCK_TOKENS])))
    return hashes
