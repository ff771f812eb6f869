"""An engine that follows a record executes each command after as many steps as the record says."""

from concurrent.futures import Future

import pytest

from torchtitan_rl.engine.commands import AddRequests, CancelRequests, JoinCompany, Load, LoadAdapters
from torchtitan_rl.engine.followed_schedule import FollowedSchedule
from torchtitan_rl.record.schedule import Companion, ScheduleEntry, request_key
from torchtitan_rl.types import Request, SamplingParams

STEP = (AddRequests(), [])


def request(seed):
    return Request([1, 2], SamplingParams(max_tokens=4, seed=seed))


def entry(iteration, unfinished, *seeds, version=None):
    requests = [(seed, request_key(request(seed))) for seed in seeds]
    return ScheduleEntry(iteration=iteration, unfinished=unfinished, requests=requests, version=version)


def add(*seeds):
    return AddRequests([(str(seed), request(seed)) for seed in seeds]), [Future() for _ in seeds]


def companion(number):
    return Companion(number=number, num_tokens=9, num_computed=8, waits=False, num_left=3, temperature=1.0)


def admitted(received):
    command, futures = received
    assert isinstance(command, AddRequests) and command.holds_step and len(futures) == len(command.requests)
    return [int(name) for name, _ in command.requests]


@pytest.fixture
def followed():
    """A record: version 1, then requests 1 and 2, request 3 after two steps, version 2 after a third one."""
    return FollowedSchedule(
        [entry(0, 0, version=1), entry(0, 0, 1, 2), entry(2, 2, 3), entry(3, 1, version=2), entry(3, 1, 4)]
    )


def test_commands_that_come_early_and_in_another_order_wait_until_they_are_due(followed):
    second, loads = Future(), Future()
    followed.receive(Load(2), [second])
    followed.receive(*add(4, 3, 2))
    assert followed.next(0, 0, has_work=False) is None and followed.awaited() == "the load of version 1"
    followed.receive(Load(1), [loads])
    assert followed.next(0, 0, has_work=False) == (Load(1, holds_step=True), [loads])
    assert followed.next(0, 0, has_work=False) is None and followed.awaited() == "1 of 2 requests"
    followed.receive(*add(1))
    assert admitted(followed.next(0, 0, has_work=False)) == [1, 2]
    assert followed.next(0, 2, has_work=True) == followed.next(1, 2, has_work=True) == STEP
    assert admitted(followed.next(2, 2, has_work=True)) == [3]
    assert followed.next(2, 3, has_work=True) == STEP
    assert followed.next(3, 1, has_work=True) == (Load(2, holds_step=True), [second])
    assert admitted(followed.next(3, 1, has_work=True)) == [4] and not followed.is_over
    assert followed.next(4, 2, has_work=True) == STEP
    assert admitted(followed.next(5, 0, has_work=False)) == [] and followed.is_over


def test_adapters_go_into_the_slot_of_the_record_and_requests_have_its_versions():
    load, admission = entry(0, 0, version=5), entry(0, 0, 1, 2)
    load.slot, admission.adapters = 1, [5, 4]
    followed = FollowedSchedule([load, admission])
    asked, loaded, later = add(2, 1), Future(), Future()
    for _, one in asked[0].requests:
        one.adapter = 3
    followed.receive(*asked)
    followed.receive(LoadAdapters(5, 70), [loaded])
    followed.receive(LoadAdapters(6, 71), [later])
    assert followed.next(0, 0, has_work=False) == (LoadAdapters(6, 71), [later]), "the record has it not"
    assert followed.next(0, 0, has_work=False) == (LoadAdapters(5, 1, holds_step=True), [loaded])
    command, _ = received = followed.next(0, 0, has_work=False)
    assert admitted(received) == [1, 2] and [one.adapter for _, one in command.requests] == [5, 4]


def test_adapters_that_the_record_had_later_are_loaded_where_it_is_followed_no_further():
    load = entry(4, 0, version=5)
    load.slot = 1
    followed = FollowedSchedule([load])
    followed.receive(LoadAdapters(5, 70), [waits := Future()])
    assert admitted(followed.part("a test")) == []
    assert followed.next(0, 0, has_work=False) == (LoadAdapters(5, 70, holds_step=True), [waits])


def test_requests_that_the_record_does_not_have_wait_for_its_end():
    followed = FollowedSchedule([entry(0, 0, 1), entry(1, 1, 2)])
    followed.receive(*add(9, 1, 2))
    assert admitted(followed.next(0, 0, has_work=False)) == [1]
    assert admitted(followed.next(1, 1, has_work=True)) == [2] and not followed.is_over
    assert followed.next(1, 2, has_work=True) == STEP
    assert admitted(followed.next(2, 0, has_work=False)) == [9] and followed.is_over


@pytest.mark.parametrize(("iteration", "unfinished", "has_work"), [(2, 1, True), (1, 0, False), (3, 2, True)])
def test_an_engine_that_is_elsewhere_follows_no_further(followed, caplog, iteration, unfinished, has_work):
    followed.receive(Load(1), [Future()])
    followed.receive(*add(1, 2, 3, 9))
    followed.next(0, 0, has_work=False), followed.next(0, 0, has_work=False)
    assert admitted(followed.next(iteration, unfinished, has_work=has_work)) == [3, 9]
    assert followed.is_over
    assert f"at iteration {iteration} it has {unfinished} requests; the record has 2 at iteration 2" in caplog.text


def test_a_load_that_came_after_the_engine_was_killed_waits_for_the_requests_that_it_has_answered():
    followed, (before, first, later) = FollowedSchedule([entry(0, 0, version=3), entry(0, 0, 1)]), add(7, 8, 9)[1]
    for version, future in ((2, before), (4, later), (3, first)):
        followed.receive(Load(version), [future])
    followed.receive(*add(1))
    assert followed.next(0, 0, has_work=False) == (Load(2), [before])  # before the record's first
    assert followed.next(0, 0, has_work=False) == (Load(3, holds_step=True), [first])
    assert admitted(followed.next(0, 0, has_work=False)) == [1]
    assert followed.next(0, 1, has_work=True) == followed.next(5, 1, has_work=True) == STEP
    assert admitted(followed.next(9, 0, has_work=False)) == [] and not followed.is_over
    command, futures = late = add(3)  # comes while the load that was held back is not executed yet
    followed.receive(command, futures)
    assert {*followed.futures()} == {later, *futures}
    assert followed.next(9, 0, has_work=False) == (Load(4, holds_step=True), [later])
    assert not followed.is_over
    assert followed.next(9, 0, has_work=False) == late and followed.is_over


def test_what_comes_while_a_record_that_is_followed_no_further_still_holds_loads_is_executed():
    followed, (first, later) = FollowedSchedule([entry(0, 0, version=3), entry(4, 0, version=4)]), add(1, 2)[1]
    followed.receive(Load(4), [later])
    assert admitted(followed.part("a test")) == [] and not followed.is_over
    followed.receive(Load(3), [first])
    assert followed.next(0, 0, has_work=False) == (Load(4, holds_step=True), [later])
    assert followed.next(0, 0, has_work=False) == (Load(3), [first]) and followed.is_over


def test_a_company_joins_after_the_first_load_and_before_all_else():
    company = [companion(0), companion(0)]
    followed, load = FollowedSchedule([entry(0, 2, version=4), entry(0, 2, 1), entry(3, 1, 2)], company), Future()
    followed.receive(*add(2, 1))
    assert followed.next(0, 0, has_work=False) is None
    followed.receive(Load(4), [load])
    assert followed.next(0, 0, has_work=False) == (Load(4, holds_step=True), [load])
    assert followed.next(0, 0, has_work=False) == (JoinCompany(company, holds_step=True), [])
    assert admitted(followed.next(0, 2, has_work=True)) == [1]
    assert followed.next(0, 3, has_work=True) == STEP
    assert admitted(followed.next(3, 1, has_work=True)) == [2]


def test_what_was_cancelled_is_cancelled_at_the_same_step_by_its_number_here():
    cancelled = ScheduleEntry(iteration=2, unfinished=3, cancelled=[11, 1, 99])
    followed = FollowedSchedule([entry(0, 1, version=4), entry(0, 1, 1, 2), cancelled], [companion(11)])
    followed.receive(Load(4), [Future()])
    requests, futures = add(2, 1)
    for number, (_, request) in enumerate(requests.requests, 50):
        request.number = number
    followed.receive(requests, futures)
    assert isinstance(followed.next(0, 0, has_work=False)[0], Load)
    assert isinstance(followed.next(0, 0, has_work=False)[0], JoinCompany)
    assert admitted(followed.next(0, 1, has_work=True)) == [1, 2]
    assert followed.next(0, 3, has_work=True) == followed.next(1, 3, has_work=True) == STEP
    assert followed.next(2, 3, has_work=True) == (CancelRequests([-12, 51], holds_step=True), [])
    assert followed.next(2, 1, has_work=True) == STEP


def test_every_future_that_waits_is_known(followed):
    load, (requests, futures) = Future(), add(1, 9)
    followed.receive(Load(1), [load])
    followed.receive(requests, futures)
    assert {*followed.futures()} == {load, *futures}
