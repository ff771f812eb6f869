"""What a replay takes from the record, and what its engines sample again."""

from torchtitan_rl.dispatch.recorded_answers import RecordedAnswers
from torchtitan_rl.record.schedule import ScheduleEntry, request_key
from torchtitan_rl.types import Request, SamplingParams


def request(seed, num_tokens=2):
    return Request([1] * num_tokens, SamplingParams(max_tokens=4, seed=seed))


def turn(seed, token, num_prompt_tokens=2):
    return {
        "seed": seed,
        "num_prompt_tokens": num_prompt_tokens,
        "tokens": [token],
        "logprobs": [-0.5],
        "policy_versions": [3],
        "finish_reason": "stop",
    }


def admitted(*requests):
    keys = [(number, request_key(each)) for number, each in enumerate(requests, 1)]
    return ScheduleEntry(iteration=0, unfinished=0, requests=keys)


def test_a_request_that_the_schedule_has_is_sampled_again_and_the_turn_before_it_is_not():
    rollouts = [{"turns": [turn(7, 21), turn(8, 22, 5)]}, {"turns": [turn(9, 23)]}]
    answers = RecordedAnswers(
        [[admitted(request(8, 5))], [ScheduleEntry(iteration=0, unfinished=0, version=4)]], rollouts
    )
    first = answers.take(request(7))
    assert (first.tokens, first.logprobs, first.policy_versions, first.finish_reason) == ([21], [-0.5], [3], "stop")
    assert answers.take(request(8, 5)) is None
    assert answers.take(request(9)).tokens == [23]


def test_a_request_that_two_engines_had_is_sampled_again_once():
    answers = RecordedAnswers([[admitted(request(7))]] * 2, [{"turns": [turn(7, 21)]}])
    assert answers.take(request(7)) is None
    assert answers.take(request(7)).tokens == [21]


def test_what_the_record_does_not_have_is_said_once(caplog):
    answers = RecordedAnswers([[]], [{"turns": [turn(7, 21), turn(None, 22)]}, {"turns": None}])
    unknown = request(7, 3), request(6), request(None), Request([1, 2], None)
    assert [answers.take(each) for each in unknown] == [None] * 4
    (record,) = caplog.records
    assert "a request of 3 tokens is neither in the schedule nor in the recorded rollouts" in record.message
