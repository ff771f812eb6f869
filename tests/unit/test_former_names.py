"""Modules that have moved are importable under their former names, with a warning, and are the same modules."""

import importlib

import pytest

from torchtitan_rl.former_names import FORMER_NAMES


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_the_present_module_and_warns(former):
    present = importlib.import_module(f"torchtitan_rl.{FORMER_NAMES[former]}")
    with pytest.warns(DeprecationWarning, match=f"torchtitan_rl.{FORMER_NAMES[former]}"):
        module = importlib.import_module(f"torchtitan_rl.{former}")
    assert module is present and present.__spec__.name == present.__name__


def test_a_name_that_never_was_is_refused():
    with pytest.raises(ModuleNotFoundError, match="torchtitan_rl.run.nothing"):
        importlib.import_module("torchtitan_rl.run.nothing")
