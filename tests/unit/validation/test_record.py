"""What cannot be recorded is refused before a process starts."""

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.record import steps_of
from torchtitan_rl.validation.record import check_profile


def refused(steps, ranks=("policy-0",)):
    config = load_config("configs/quickstart.py")
    config.record.profile.steps, config.record.profile.ranks = steps, list(ranks)
    return refusal(check_profile, config)


def test_steps_and_ranges_are_read():
    assert steps_of("3,5-6") == [3, 5, 6]
    assert steps_of("7-7,2") == [2, 7]


@pytest.mark.parametrize("text", ["", "3,", "a", "-3", "6-5", "3-", "1.5", "3;4"])
def test_what_is_no_list_of_steps_is_refused(text):
    with pytest.raises(ValueError, match=r"is no step and no range; write steps as in 3,5-6"):
        steps_of(text)


def test_profiles_of_what_a_run_does_not_have_are_refused():
    assert refused([0]).startswith("record.profile.steps=[0]: 0 is no step of the reinforcement phase; choose from 1")
    assert "choose from 1 to controller.num_steps=160" in refused([3, 161])
    assert refused([3], ["policy-1"]).endswith("there is no 'policy-1'; choose from policy-0, generator-0-0")
    assert refused([3], []).startswith("record.profile.ranks=[]: names no rank")


def test_a_range_of_steps_whose_traces_fill_a_disk_is_refused():
    with pytest.raises(ValueError, match="'5-99999999999' is more than 10,000 steps, and each leaves a trace"):
        steps_of("3,5-99999999999")
