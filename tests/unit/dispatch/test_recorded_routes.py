"""A replay sends each request to the engines that it was in."""

from torchtitan_rl.dispatch.recorded_routes import RecordedRoutes
from torchtitan_rl.record.schedule import ScheduleEntry, request_key
from torchtitan_rl.types import Request, SamplingParams


def request(seed):
    return Request([1, 2], SamplingParams(max_tokens=4, seed=seed))


def entry(at, *numbers_and_seeds):
    requests = [(number, request_key(request(seed))) for number, seed in numbers_and_seeds]
    return ScheduleEntry(iteration=0, unfinished=0, at=at, requests=requests)


def test_a_request_goes_where_it_was_and_last_to_the_engine_that_came_last():
    routes = RecordedRoutes(
        [
            [entry(10, (1, 7), (2, 8))],  # lost, and request 2 unanswered
            [entry(10, (3, 9)), entry(20, (2, 8))],
            [entry(15, (2, 8)), entry(30, (4, 7))],  # lost too, between the two
        ]
    )
    assert routes.route(request(9)) == [1]
    assert routes.route(request(8)) == [0, 2, 1]
    assert [routes.route(request(7)) for _ in range(3)] == [[0], [2], [0]]  # twice in the record, then in none
