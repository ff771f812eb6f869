"""Requests that hypothesis makes up: see fuzz.py, which goes on for as long as one likes."""

import pytest

from tests.unit.serve.fuzz import fuzz


def test_no_request_gets_500():
    statuses = fuzz(60, max_examples=300, same=True)
    assert statuses[200] > 2 and statuses[400] > 20


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_no_request_gets_500_in_two_minutes():
    assert sum(fuzz(120).values()) > 500  # some thousand on idle cores
