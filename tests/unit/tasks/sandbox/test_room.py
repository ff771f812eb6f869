"""Which host gets the next sandbox: fewest per core, unless memory is scarcer."""

import pytest

from torchtitan_rl.tasks.sandbox.room import SandboxRoom, roomiest

GIB = 2**30


def rooms(*num_running, cores=(2, 64, 64), free_gib=(1000, 1000, 1000)):
    return [
        SandboxRoom(num_cores=num_cores, free_bytes=free * GIB, num_running=number, allowed_bytes=number * GIB)
        for number, num_cores, free in zip(num_running, cores, free_gib, strict=True)
    ]


def test_each_host_gets_sandboxes_in_proportion_to_its_cores():
    running = [0, 0, 0]
    for _ in range(130):
        running[roomiest(rooms(*running), GIB)] += 1
    assert running == [2, 64, 64]


def test_the_first_of_equal_hosts_gets_the_next_one():
    assert roomiest(rooms(0, 0, 0, cores=(8, 8, 8)), GIB) == 0
    assert roomiest(rooms(1, 0, 0, cores=(8, 8, 8)), GIB) == 1


def test_a_host_without_memory_is_passed_over_however_many_cores_it_has():
    # The second has 16 times the cores and memory for 8 of such sandboxes: 8 there, one core's worth each elsewhere.
    running = [0, 0]
    for _ in range(16):
        running[roomiest(rooms(*running, cores=(4, 64), free_gib=(1000, 8)), GIB)] += 1
    assert running == [5, 11]  # loads 5/4 and 11/8
    assert roomiest(rooms(3, 0, cores=(4, 64), free_gib=(1000, 0)), GIB) == 0


def test_memory_counts_by_what_the_next_sandbox_may_use():
    two = rooms(0, 0, cores=(4, 8), free_gib=(64, 8))
    assert roomiest(two, GIB // 4) == 1  # 1/4 and 1/8 of the cores
    assert roomiest(two, 4 * GIB) == 0  # 1/4 of the cores and 1/2 of the memory


def test_a_lost_host_gets_none():
    assert roomiest([None, *rooms(9, cores=(1,), free_gib=(1,))], GIB) == 1
    with pytest.raises(ValueError, match="every host is lost"):
        roomiest([None, None], GIB)
