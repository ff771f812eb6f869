"""Which replica serves which request: load, sticky prefixes, named versions."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.dispatch import router as router_module
from torchtitan_rl.dispatch.router import Router


def router_of(num_replicas=4):
    return Router(num_replicas)


def route(router, prompts, version=None, *, lost=(), loaded_versions=None, newest=1):
    healthy = [index for index in range(len(router.loads)) if index not in lost]
    return router.route(
        prompts,
        version,
        serving=healthy,
        loaded_versions=loaded_versions or [newest] * len(router.loads),
        newest=newest,
    )


def set_loads(router, numbers):
    """As if so many requests were unanswered, of which nobody remembers the prompts."""
    router._loads = router_module._Loads(numbers)


def group(prompt, n):
    return [prompt] * n


def test_new_prompts_go_to_the_replica_with_the_fewest_requests_and_ties_to_the_first():
    router = router_of(3)
    assert route(router, [[1], [2], [3], [4], [5]]) == [0, 1, 2, 0, 1]
    assert router.loads == [2, 2, 1]
    router.finished(0, 2, None)
    assert route(router, [[6], [7], [8]]) == [0, 0, 2]


def test_a_groups_equal_prompts_go_to_one_replica_and_groups_spread():
    prompts = [*group([1, 2], 8), *group([3, 4], 8), *group([5, 6], 8), *group([7, 8], 8), *group([9], 8)]
    assert route(router_of(), prompts) == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8 + [0] * 8


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 40])
def test_the_next_turn_goes_where_the_longest_prompt_it_extends_went(length):
    router = router_of(3)
    others, prompt = [[7]], list(range(length))
    assert route(router, others + [prompt]) == [0, 1]
    router.finished(0, 1, None), router.finished(1, 1, None)
    longer = prompt + [50, 51, 52]
    assert route(router, [longer, prompt + [9] * 40, [7, 8], [3, 3, 3]]) == [1, 1, 0, 2]
    set_loads(router, [0, 0, 0])
    assert route(router, [longer + [1] * 20]) == [1]


def test_prompts_that_only_share_a_beginning_spread():
    system = list(range(100, 132))
    assert route(router_of(), [system + [i] for i in range(4)]) == [0, 1, 2, 3]


def test_a_pull_forgets_the_prompts_of_that_replica_only():
    router = router_of(2)
    assert route(router, [[1], [2]]) == [0, 1]
    router.loaded(1)
    router.finished(1, 1, None)  # now the least loaded
    assert route(router, [[1], [2], [3]]) == [0, 1, 1]
    router.loaded(0)
    set_loads(router, [5, 0])
    assert route(router, [[1]]) == [1]


def test_stickiness_ends_at_one_and_a_half_times_the_fair_share():
    # 512 requests over 4 replicas: a share of 128, so at most 192 of one prompt to one replica.
    assert Counter(route(router_of(), group([1], 512))) == {0: 192, 1: 192, 2: 128}
    # Up to 32 together cost little: no splitting, however unfair.
    assert Counter(route(router_of(), group([1], 32))) == {0: 32}
    assert Counter(route(router_of(), group([1], 40))) == {0: 32, 1: 8}


def test_a_prompt_that_had_to_move_is_sticky_where_it_went():
    router = router_of(2)
    route(router, group([1], 40))
    set_loads(router, [0, 0])
    assert route(router, [[1, 2]]) == [1]


def test_a_lost_replica_gets_nothing_not_even_the_prompts_it_had():
    router = router_of(3)
    assert route(router, [[1], [2], [3]]) == [0, 1, 2]
    assert route(router, [[2], [2, 5], [4]], lost=[1]) == [0, 0, 2]


def test_a_named_version_goes_where_it_is_held_even_if_that_replica_is_busier():
    router = router_of(3)
    set_loads(router, [0, 9, 0])
    assert route(router, [[1], [2]], 3, loaded_versions=[5, 3, 5], newest=5) == [1, 1]


def test_a_named_version_that_nobody_holds_makes_one_replica_change_not_all():
    router = router_of(3)
    set_loads(router, [4, 0, 2])
    assert route(router, [[1], [2], [3]], 3, loaded_versions=[5, 5, 5], newest=5) == [1, 1, 1]
    # It has not loaded it yet, but it is on the way.
    assert route(router, [[4]], 3, loaded_versions=[5, 5, 5], newest=5) == [1]
    router.finished(1, 4, 3)
    set_loads(router, [0, 4, 2])
    assert route(router, [[4]], 3, loaded_versions=[5, 5, 5], newest=5) == [0]


def test_many_requests_of_a_version_that_nobody_holds_are_worth_a_change_on_idle_replicas():
    router = router_of(4)
    route(router, [[1]], loaded_versions=[5, 5, 5, 5], newest=5)  # the first is busy
    prompts = [[i, i] for i in range(96)]
    chosen = route(router, prompts, 3, loaded_versions=[5, 5, 5, 5], newest=5)
    assert {index: chosen.count(index) for index in set(chosen)} == {1: 32, 2: 32, 3: 32}
    assert set(route(router_of(2), prompts[:63], 3, loaded_versions=[5, 5], newest=5)) == {0}
    # One that holds it already is one of them, however busy.
    router = router_of(3)
    route(router, [[9]], 3, loaded_versions=[5, 3, 5], newest=5)
    assert set(route(router, prompts[:64], 3, loaded_versions=[5, 3, 5], newest=5)) == {0, 1}


def test_a_named_version_that_all_hold_spreads():
    assert route(router_of(2), [[1], [2], [3], [4]], 5, newest=5) == [0, 1, 0, 1]


def test_requests_without_a_version_avoid_a_replica_that_somebody_keeps_at_an_old_one():
    router = router_of(2)
    assert route(router, [[1]], 3, newest=5) == [0]
    assert route(router, [[2], [3]], loaded_versions=[3, 5], newest=5) == [1, 1]
    assert route(router, [[4], [5]], 4, loaded_versions=[3, 5], newest=5) == [0, 0]
    assert route(router, [[6]], lost=[1], loaded_versions=[3, 5], newest=5) == [
        0
    ]  # it waits there until the old version is done with


def test_memory_is_bounded_and_forgets_the_oldest_first(monkeypatch):
    monkeypatch.setattr(router_module, "_MAX_PROMPTS", 2)
    router = router_of(2)
    assert route(router, [[1], [2]]) == [0, 1]
    assert route(router, [[1], [3], [4]]) == [0, 1, 0]  # 1 was used again, so 2 went, and then 1
    assert len(router._homes) == 2 and sum(router._keys_per_hash.values()) == 2
    set_loads(router, [9, 0])
    assert route(router, [[1]]) == [1]


PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=60)


@settings(deadline=None, derandomize=True)
@given(flushes=st.lists(PROMPTS, min_size=1, max_size=4), num_replicas=st.integers(1, 4))
def test_the_same_history_routes_the_same_way_and_counts_every_request(flushes, num_replicas):
    routers = [router_of(num_replicas), router_of(num_replicas)]
    total = 0
    for number, prompts in enumerate(flushes):
        first, second = [route(router, prompts) for router in routers]
        assert first == second
        assert set(first) <= set(range(num_replicas))
        total += len(prompts)
        assert sum(routers[0].loads) == total
        for router in routers:
            router.loaded(number % num_replicas)


@settings(deadline=None, derandomize=True)
@given(prompts=PROMPTS, before=st.lists(st.integers(0, 80), min_size=4, max_size=4), num_replicas=st.integers(1, 4))
def test_no_replica_gets_more_than_the_limit(prompts, before, num_replicas):
    router = router_of(num_replicas)
    set_loads(router, before[:num_replicas])
    limit = max(32, math.ceil(1.5 * (sum(router.loads) + len(prompts)) / num_replicas))
    route(router, prompts)
    assert all(after <= max(was, limit) for was, after in zip(before, router.loads))


@settings(deadline=None, derandomize=True)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    more=st.lists(st.integers(0, 9), max_size=60),
    noise=st.lists(st.lists(st.integers(10, 19), min_size=1, max_size=60), max_size=20),
)
def test_any_extension_follows_its_prompt(prompt, more, noise):
    router = router_of()
    (home,) = route(router, [*noise, prompt])[-1:]
    set_loads(router, [0 if i != home else 31 for i in range(4)])
    assert route(router, [prompt + more]) == [home]


@settings(deadline=None, derandomize=True)
@given(prompts=PROMPTS, lost=st.sets(st.integers(0, 3), max_size=3))
def test_lost_replicas_get_nothing(prompts, lost):
    router = router_of()
    route(router, prompts)
    assert not lost & set(route(router, prompts, lost=lost))
