"""The other end of `reward_process.RewardProcess`: `python -m torchtitan_rl.tasks.reward_worker PARENT_PID`.

Reads pickles of `(number, "load", pickled function)` and `(number, "call", pickled arguments)` from standard input.
Answers each with 8 bytes of length and a JSON object: `number`, `problem` (empty where all is well), `traceback`, and
for a call `value`, with `parts` beside it where the function returned `(rewards, parts)`. Ends when its parent ends.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from torchtitan_rl.environment import TIMELINE
from torchtitan_rl.record.tracing import served
from torchtitan_rl.tasks.process_tree import supervised


def main(parent: int) -> None:
    supervised(parent)
    # For pickled Tasks: imported before a call because it takes seconds, and here because the supervisor needs none.
    import torchtitan_rl.types  # noqa: F401

    # A scheduler may send SIGTERM to every process of a run, and means the controller. SIG_IGN would be inherited by
    # programs that a reward function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A reward function must neither print into the answers nor read the requests: give it other descriptors, and a
    # child that it forks none of these.
    requests, answers, process = os.fdopen(os.dup(0), "rb"), os.dup(1), os.getpid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (requests.fileno(), answers):
        os.register_at_fork(after_in_child=partial(os.dup2, nothing, descriptor))
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if TIMELINE in os.environ:
        from torchtitan_rl.record.timeline import recording

        recording.begin("reward")
    function = None
    while True:
        try:
            number, verb, pickled = pickle.load(requests)
        except EOFError:
            return
        if verb == "load":
            answer = _attempt(partial(pickle.loads, pickled), "could not be loaded by a process: ")
            function = answer.pop("value", None)
        else:
            with served("compute rewards"):
                answer = _attempt(partial(_called, function, pickled), "raised ")
            answer |= answer.pop("value", {})
        if os.getpid() != process:  # a child that the function forked: the answer is its parent's
            os._exit(0)
        content = json.dumps({"number": number, **answer}).encode()
        _write_all(answers, len(content).to_bytes(8, "big") + content)


def _called(function: Callable, pickled: bytes) -> dict[str, Any]:
    value = function(*pickle.loads(pickled))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # (rewards, parts)
        parts = [[_plain_name(name), _plain(numbers)] for name, numbers in value[1].items()]
        return {"value": _plain(value[0]), "parts": parts}
    return {"value": _plain(value)}


def _plain(value: Any) -> Any:
    """A value of a reward function as JSON has it. Raises TypeError for what is no reward by any reading."""
    value = value.tolist() if hasattr(value, "tolist") else value  # a tensor or an array
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TypeError(f"returned a {type(value).__name__} from a process, which sends back numbers and lists of numbers")


def _plain_name(name: Any) -> Any:
    """The name of a part; one that is no text is refused where all parts are read, by its repr."""
    return name if isinstance(name, str) or name is None else float(name) if isinstance(name, numbers.Real) else ""


def _attempt(action: Callable, prefix: str) -> dict[str, Any]:
    """The action's result as `value`, or as `problem` the prefix and the exception in one line, with a `traceback`."""
    try:
        return {"problem": "", "traceback": "", "value": action()}
    except BaseException as error:  # SystemExit too: the process is wanted for other tasks
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        return {"problem": prefix + message, "traceback": traceback.format_exc()}


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
