"""The message with which a call is refused."""

import pytest


def refusal(function, *arguments, error=ValueError, **named) -> str:
    """What `function` says when it refuses its arguments. Three lines is all that the command line shows of it."""
    with pytest.raises(error) as caught:
        function(*arguments, **named)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    return message
