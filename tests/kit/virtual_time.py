"""Tests whose sleeps take no time."""

import functools

from tests.simulation.virtual_clock import VirtualLoop


def on_virtual_time(test):
    """The test on a loop of its own whose sleeps take no time, and end in the order of their lengths on any machine."""

    @functools.wraps(test)
    def run(*arguments, **keywords):
        loop = VirtualLoop(now=0.0, limit_s=3600.0)
        try:
            loop.run_until_complete(test(*arguments, **keywords))
        finally:
            loop.close()

    return run
