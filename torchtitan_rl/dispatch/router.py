"""Which replica serves which request. A router calls nothing: equal histories of calls give equal routes."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from heapq import heappop, heappush
from itertools import islice

__all__ = ["Router"]

_BLOCK_TOKENS = 16  # tokens per hashed block
_MAX_PROMPTS = 16384  # remembered prompts, for every `_REPLICAS_PER_MEMORY` replicas
_REPLICAS_PER_MEMORY = 32
_STICKY_REQUESTS = 32  # an engine decodes 32 requests together in little more time than one
_STICKY_SHARE = 1.5
_FEW = 8  # so many candidates are sooner looked at one by one than taken from the heap


class Router:
    """Load and sticky prefixes of several replicas, by index. `MeshSamplingClient` says which replicas get requests.

    Candidates are those of them that `_pinned` or `_unpinned` chooses for the request's policy version. Two rules, in
    order:

    1. The replica whose prefix cache holds the prompt: since that replica last loaded weights, the prompt (another
       rollout of a group) or the longest prompt that it extends (the turn before) was sent there. The rule does not
       apply to a replica with at least 32 unanswered requests and at least 1.5 x the candidates' mean, counting the
       requests to route: waiting there costs more than a shared prefix saves.
    2. The replica with the fewest unanswered requests; of equals, the lowest index. Requests are counted, not tokens:
       an engine decodes sequences side by side, and the length of a completion is not known in advance.

    The router also sums up how long requests are with each replica; these times decide nothing.
    """

    def __init__(self, num_replicas: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loads, self._indices = _Loads([0] * num_replicas), frozenset(range(num_replicas))
        self._pinned_counts = [Counter() for _ in range(num_replicas)]
        """Per replica, the unanswered pinned requests by policy version."""
        self._newest: int | None = None
        self._with_older_pins: set[int] = set()
        """The replicas with requests that are pinned to another version than `_newest`."""
        self._serving: Sequence[int] = ()
        self._all: frozenset[int] = frozenset()
        """The members of `_serving`."""
        self._num_loads = [0] * num_replicas
        self._homes: OrderedDict[tuple[int, tuple[int, ...]], tuple[int, int]] = OrderedDict()
        """(hash of a prompt's whole blocks, the tokens after the last whole block) -> (replica, the replica's number of
        loads when the prompt was sent), oldest first."""
        self._keys_per_hash: Counter[int] = Counter()
        """Hash -> number of keys of `_homes` with the hash. Most block hashes of a prompt are in no key: a count of 0
        saves the lookups."""
        self._clock, self._in_flight_s = clock, [0.0] * num_replicas
        self._since = [clock()] * num_replicas
        """Per replica, the time of the last change of its requests."""
        self._answered = [0] * num_replicas

    @property
    def loads(self) -> list[int]:
        """Per replica, the requests sent and not answered yet."""
        return self._loads.numbers

    def times(self) -> list[tuple[float, int]]:
        """Per replica, the requests in flight summed over the seconds so far, and how many have been answered or given
        up. May be called from any thread."""
        now = self._clock()  # not strict: another thread may be in the middle of `add`
        last = zip(self._in_flight_s, self.loads, self._since, self._answered, strict=False)
        return [(spent + load * (now - since), answered) for spent, load, since, answered in last]

    # Events of replicas.

    def add(self) -> None:
        """One more replica, without requests; its index is the next one."""
        self._loads.append()
        self._indices |= {len(self._pinned_counts)}
        self._pinned_counts.append(Counter())
        self._num_loads.append(0)
        self._in_flight_s.append(0.0)
        self._since.append(self._clock())
        self._answered.append(0)

    def loaded(self, index: int) -> None:
        """The replica has loaded weights, so its caches are empty."""
        self._num_loads[index] += 1

    def finished(self, index: int, num_requests: int, version: int | None) -> None:
        """Requests that were routed to the replica have been answered, or never will be."""
        self._answered[index] += num_requests
        if not num_requests:
            return
        self._count(index, -num_requests)
        if version is not None:
            named = self._pinned_counts[index]
            named[version] -= num_requests
            if not named[version]:
                del named[version]
                if not named.keys() - {self._newest}:
                    self._with_older_pins.discard(index)

    # Routing.

    def route(
        self,
        prompts: Sequence[list[int]],
        version: int | None,
        *,
        serving: Sequence[int],
        loaded_versions: Sequence[int | None],
        newest: int | None,
    ) -> list[int]:
        """A replica for each prompt, in order; counts each prompt as sent. `version` is the version that the requests
        are pinned to, None for unpinned requests. `serving` lists the replicas that get requests, at least one;
        the same list costs nothing to look at again. `loaded_versions` has the version of every replica, in `serving`
        or not; only requests that are pinned need it. `newest` is the version that serves unpinned requests."""
        self._note(serving, newest)
        candidates = self._unpinned() if version is None else self._pinned(version, loaded_versions, len(prompts))
        mean_load = (self._load_of(candidates) + len(prompts)) / len(candidates)
        sticky_limit = max(_STICKY_REQUESTS, math.ceil(_STICKY_SHARE * mean_load))
        sole_candidate = next(iter(candidates)) if len(candidates) == 1 else None
        chosen: list[int] = []
        previous, hashes = None, []
        for prompt in prompts:
            if sole_candidate is not None:
                index = sole_candidate
            else:
                if prompt != previous:  # equal prompts of a group are adjacent: hash once
                    previous, hashes = prompt, _block_hashes(prompt)
                index = self._home(prompt, hashes)
                if index not in candidates or self.loads[index] >= sticky_limit:
                    index = self._loads.least(candidates)
                self._remember(prompt, hashes, index)
            self._count(index, 1)
            if version is not None:
                self._pinned_counts[index][version] += 1
                if version != newest:
                    self._with_older_pins.add(index)
            chosen.append(index)
        return chosen

    def _count(self, index: int, number: int) -> None:
        """`number` more requests of a replica are unanswered, or fewer where negative."""
        now = self._clock()
        self._in_flight_s[index] += self.loads[index] * (now - self._since[index])
        self._since[index] = now
        self._loads.add(index, number)

    def _note(self, serving: Sequence[int], newest: int | None) -> None:
        """Looks at every replica where something has changed since the last call."""
        if serving is not self._serving:
            self._serving, self._all = serving, frozenset(serving)
        if newest != self._newest:
            self._newest = newest
            self._with_older_pins = {
                index for index, counts in enumerate(self._pinned_counts) if counts.keys() - {newest}
            }

    def _unpinned(self) -> Set[int]:
        """The candidates for unpinned requests: the replicas with no request pinned to an older version, or all when
        there are none."""
        return (self._all - self._with_older_pins) or self._all if self._with_older_pins else self._all

    def _pinned(self, version: int, loaded_versions: Sequence[int | None], num_requests: int) -> Set[int]:
        """The candidates for requests pinned to a version; at least one, by index: serving replicas that hold the
        version or have requests of it, then idle replicas, which load it, until there is one replica per 32 requests.
        When both are none: the serving replica with the fewest requests."""
        # A replica that is about to load the version counts as holding it: more requests of the version must not make
        # another replica load it too.
        holding = {i for i in self._serving if loaded_versions[i] == version or version in self._pinned_counts[i]}
        if (num_missing := num_requests // _STICKY_REQUESTS - len(holding)) > 0:
            idle = (i for i in self._serving if i not in holding and not self.loads[i])
            holding |= set(islice(idle, num_missing))
        return holding or {self._loads.least(self._all)}

    def _load_of(self, indices: Set[int]) -> int:
        """The unanswered requests of some replicas. Looks at them, or at all but them where these are fewer."""
        if 2 * len(indices) <= len(self.loads):
            return sum(self.loads[i] for i in indices)
        return self._loads.total - sum(self.loads[i] for i in self._indices - indices)

    def _home(self, prompt: list[int], hashes: list[int]) -> int | None:
        """The replica that was last sent the longest remembered prompt that `prompt` equals or extends; None when there
        is no such prompt. A prompt sent before the replica's last load does not count."""
        for num_blocks in reversed(range(len(hashes))):
            if not self._keys_per_hash[hashes[num_blocks]]:
                continue
            tail = tuple(prompt[num_blocks * _BLOCK_TOKENS :][: _BLOCK_TOKENS - 1])
            for length in reversed(range(len(tail) + 1)):
                index, num_loads = self._homes.get((hashes[num_blocks], tail[:length]), (None, 0))
                if index is not None and num_loads == self._num_loads[index]:
                    return index
        return None

    def _remember(self, prompt: list[int], hashes: list[int], index: int) -> None:
        key = hashes[-1], tuple(prompt[(len(hashes) - 1) * _BLOCK_TOKENS :])
        if key not in self._homes:
            self._keys_per_hash[key[0]] += 1
        self._homes[key] = index, self._num_loads[index]
        self._homes.move_to_end(key)
        if len(self._homes) > _MAX_PROMPTS * max(1, len(self._num_loads) // _REPLICAS_PER_MEMORY):
            (ending, _), _ = self._homes.popitem(last=False)
            self._keys_per_hash[ending] -= 1
            if not self._keys_per_hash[ending]:
                del self._keys_per_hash[ending]


class _Loads:
    """How many unanswered requests each replica has, by index. `least` takes time logarithmic in the number of
    replicas, and linear in that of the less loaded replicas that may not be chosen."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.total = sum(numbers)
        self._begin()

    def add(self, index: int, number: int) -> None:
        """`number` more requests, or fewer where negative."""
        self.numbers[index] += number
        self.total += number
        heappush(self._heap, (self.numbers[index], index))
        if len(self._heap) > 8 * len(self.numbers):  # most entries are out of date
            self._begin()

    def append(self) -> None:
        """One more replica, without requests."""
        heappush(self._heap, (0, len(self.numbers)))
        self.numbers.append(0)

    def least(self, among: Set[int]) -> int:
        """The replica of `among`, which is not empty, with the fewest requests; of equals, the lowest index."""
        if len(among) <= _FEW:
            return min(among, key=lambda index: (self.numbers[index], index))
        heap, excluded = self._heap, []
        while heap[0][1] not in among or heap[0][0] != self.numbers[heap[0][1]]:
            number, index = heappop(heap)
            if number == self.numbers[index]:
                excluded.append((number, index))
        chosen = heap[0][1]
        for entry in excluded:
            heappush(heap, entry)
        return chosen

    def _begin(self) -> None:
        self._heap = sorted((number, index) for index, number in enumerate(self.numbers))
        """Has each replica's number, and numbers that are out of date: `least` drops the ones that it meets."""


def _block_hashes(prompt: list[int]) -> list[int]:
    """Hashes of the first 0, 1, 2, ... whole blocks; each hash is computed from the one before and the next block."""
    hashes = [0]
    for start in range(0, len(prompt) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS):
        hashes.append(hash((hashes[-1], *prompt[start : start + _BLOCK_TOKENS])))
    return hashes
