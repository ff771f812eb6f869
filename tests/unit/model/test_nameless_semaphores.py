"""Semaphores that multiprocessing makes for one process leave no name in /dev/shm when the process is killed."""

import subprocess
import sys

MAKE = """
import multiprocessing
multiprocessing.set_start_method("forkserver")  # as in Monarch's processes
from torchtitan_rl.adapters import nameless_semaphores
try:
    with nameless_semaphores():
        lock = multiprocessing.Lock()
        raise KeyError
except KeyError:
    print(lock._semlock.name, multiprocessing.get_start_method(), multiprocessing.Lock()._semlock.name[:4])
"""


def test_a_lock_made_meanwhile_has_no_name_and_the_start_method_comes_back():
    done = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", "forkserver", "/mp-"]
