"""The picture of who watches whom says the numbers of the code."""

import importlib
import re

from torchtitan_rl.launch import liveness

PERIOD = re.compile(r"(\d[\d.]*) s\s+\(`(?:([\w.]+)\.)?([A-Z_]+)`\)")
"""A number of seconds with the constant that has it."""
NAME = re.compile(r"`((?:[a-z_]+\.)+)([A-Z]\w+)((?:\.\w+)?)`")
"""A class or constant of a module, or a method of such a class."""


def test_the_picture_has_the_periods_of_the_code():
    periods = PERIOD.findall(liveness.__doc__)
    assert len(periods) == 14
    for seconds, module, name in periods:
        package = "torchtitan_rl" if "." in module else liveness.__name__
        owner = importlib.import_module(f"{package}.{module}") if module else liveness
        assert getattr(owner, name) == float(seconds), name


def test_the_picture_names_every_period():
    for module in ("lease", "heartbeats", "watchdog"):
        constants = vars(importlib.import_module(f"{liveness.__name__}.{module}"))
        periods = {name for name in constants if name.endswith("_S") and not name.startswith("_")}
        assert periods == {name for _, owner, name in PERIOD.findall(liveness.__doc__) if owner == module}


def test_what_the_picture_names_is_there():
    names = NAME.findall(liveness.__doc__)
    assert len(names) > 10
    for module, name, method in names:
        package = liveness.__name__ if module in ("lease.", "heartbeats.", "watchdog.") else _parent_of(module)
        owner = getattr(importlib.import_module(f"{package}.{module.rstrip('.')}"), name)
        assert not method or hasattr(owner, method.lstrip(".")), name


def _parent_of(module: str) -> str:
    """The package that the picture means: modules of `launch` stand there by their own name."""
    return "torchtitan_rl" if module.count(".") > 1 else "torchtitan_rl.launch"
