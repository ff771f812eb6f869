"""Stored responses: which make way, and what they count as."""

import pytest

from torchtitan_rl.serve.stored_responses import StoredResponse, StoredResponses


def stored(name, text=""):
    return StoredResponse({"id": name}, [{"role": "user", "content": text}], [{"id": name}])


def kept(responses, *names):
    return [name for name in names if responses.get(name) is not None]


def test_the_least_recently_used_make_way():
    responses = StoredResponses(2, 10**6)
    for name in "ab":
        responses.keep(stored(name))
    assert responses.get("a").whole == {"id": "a"}
    responses.keep(stored("c"))
    assert kept(responses, *"abc") == ["a", "c"]


def test_bytes_are_of_the_response_and_of_its_whole_conversation():
    one = stored("a", "x" * 10)
    message = '[{"role": "user", "content": "xxxxxxxxxx"}]'
    assert one.num_bytes == len('{"id": "a"}') + len(message) + len('[{"id": "a"}]') == 67
    responses = StoredResponses(10, 2 * 67)
    for name in "abc":
        responses.keep(stored(name, "x" * 10))
    assert kept(responses, *"abc") == ["b", "c"] and responses.num_bytes == 134
    responses.keep(stored("d", "x" * 200))
    assert kept(responses, *"abcd") == [] and responses.num_bytes == 0


def test_a_response_is_forgotten_once():
    responses = StoredResponses(2, 10**6)
    responses.keep(stored("a"))
    responses.forget("a")
    assert responses.num_bytes == 0 and responses.get("a") is None
    with pytest.raises(KeyError):
        responses.forget("a")
