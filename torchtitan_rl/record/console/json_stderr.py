"""Makes JSON of what native libraries and child processes print on their own, for `--json-logs`.

A process of its own copies stderr line by line: a library writes to the file descriptor, past Python, and what it
writes as it crashes must still arrive.
"""

from __future__ import annotations

import os
import subprocess
import sys

from torchtitan_rl.record.console.notices import as_object

__all__ = ["filter_stderr"]


def filter_stderr() -> None:
    """From now on stderr of this process, and of processes that it starts, has JSON only: a line that is not an object
    becomes the `message` of an `output` event."""
    command = [sys.executable, "-m", "torchtitan_rl.record.console.json_stderr"]
    # In a session of its own: Ctrl-C is for the run, whose last words are still to come.
    copier = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
    assert copier.stdin is not None
    os.dup2(copier.stdin.fileno(), 2)
    copier.stdin.close()


def main() -> None:
    for line in sys.stdin.buffer:
        text = line.decode(errors="replace").rstrip("\n")
        if text.startswith('{"time": ') and text.endswith("}"):
            print(text, flush=True)
        elif text:
            print(as_object("output", "info", {"message": text}), flush=True)


if __name__ == "__main__":
    main()
