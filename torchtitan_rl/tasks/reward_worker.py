"""The other end of `reward_process.RewardProcess`: `python -m torchtitan_rl.tasks.reward_worker PARENT_PID`.

Reads `("load", function)` and `("call", arguments)`, each pickled within, from standard input, and answers each with
`("", value)` or `(what went wrong, traceback)`. Ends when its parent does.
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

import torchtitan_rl.types  # noqa: F401  Tasks are of it, and its imports take seconds: not when one is waited for

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int) -> None:
    _end_with_parent(parent)
    # What a reward function prints must not be taken for an answer, and what it reads is none of its business.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
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
    """Killed by the kernel when the thread that started this process ends, in the middle of anything."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit()


def _called(function: Callable, pickled: bytes) -> bytes:
    value = function(*pickle.loads(pickled))
    return cloudpickle.dumps(value.tolist() if hasattr(value, "tolist") else value)  # a tensor or an array


def _attempt(action: Callable, prefix: str) -> tuple:
    """("", what it gave), or what it raised in one line, and the traceback."""
    try:
        return "", action()
    except BaseException as error:  # SystemExit too: the process is wanted for other tasks
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        return prefix + message, traceback.format_exc().encode()


if __name__ == "__main__":
    main(int(sys.argv[1]))
