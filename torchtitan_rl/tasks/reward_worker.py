"""The other end of `reward_process.RewardProcess`: `python -m torchtitan_rl.tasks.reward_worker PARENT_PID`.

Reads pickles of `("load", pickled function)` and `("call", pickled arguments)` from standard input. Answers each with a
pickle of `("", pickled value)` or `(error message, traceback)`. Ends when its parent ends.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial

import cloudpickle

import torchtitan_rl.types  # noqa: F401  for pickled Tasks; imported before a call, because it takes seconds
from torchtitan_rl.environment import TIMELINE

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int) -> None:
    _end_with_parent(parent)
    # A scheduler may send SIGTERM to every process of a run, and means the controller. SIG_IGN would be inherited by
    # programs that a reward function starts.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # A reward function must neither print into the answers nor read the requests: give it other descriptors.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    if TIMELINE in os.environ:
        from torchtitan_rl.observability.timeline import recording

        recording.begin("reward")
    function = None
    while True:
        try:
            verb, pickled = pickle.load(requests)
        except EOFError:
            return
        if verb == "load":
            function, answer = None, _attempt(partial(pickle.loads, pickled), "could not be loaded by a process: ")
            if not answer[0]:
                function, answer = answer[1], ("", pickle.dumps(None))
        else:
            answer = _attempt(partial(_called, function, pickled), "raised ")
        pickle.dump(answer, answers)
        answers.flush()


def _end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        sys.exit()


def _called(function: Callable, pickled: bytes) -> bytes:
    value = function(*pickle.loads(pickled))
    return cloudpickle.dumps(value.tolist() if hasattr(value, "tolist") else value)  # a tensor or an array


def _attempt(action: Callable, prefix: str) -> tuple:
    """("", the action's result), or (prefix and exception in one line, traceback)."""
    try:
        return "", action()
    except BaseException as error:  # SystemExit too: the process is wanted for other tasks
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        return prefix + message, traceback.format_exc().encode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
