"""A run as a job of a scheduler."""

from torchtitan_rl.hosts import jobs
from torchtitan_rl.run.ends import PREEMPTED_STATUS


def test_a_job_is_submitted_again_at_the_status_of_a_run_that_was_asked_to_stop():
    assert jobs._PREEMPTED == PREEMPTED_STATUS
