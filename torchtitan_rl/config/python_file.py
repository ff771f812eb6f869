"""A user's Python file as a module: importing it here and in other processes, and messages that name the line of a
mistake."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from torchtitan_rl.environment import add_to_path
from torchtitan_rl.record.user_code import described, raised_at

__all__ = ["MODULE_PREFIX", "load_module", "loaded_files", "mistake"]

MODULE_PREFIX = "torchtitan_rl_config_"
"""What the names of modules of users' files begin with, before the file's own name."""


def load_module(file: Path, where: str) -> ModuleType:
    """The module of a Python file. The file's directory is on `sys.path` from then on, behind everything that is there,
    in this process and in those that it starts. The file's functions travel to other processes by value.

    Raises ValueError for a file that fails; the message begins with `where`.
    """
    name = f"{MODULE_PREFIX}{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{where}: is not a Python file; give a .py file with a config() function")
    add_to_path(str(file.parent.absolute()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{where}: importing it raised {mistake(error)}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def loaded_files() -> list[str]:
    """The files whose modules are loaded."""
    names = sorted(name for name in sys.modules if name.startswith(MODULE_PREFIX))
    return [str(file) for name in names if (file := sys.modules[name].__file__) is not None]


def mistake(error: BaseException) -> str:
    """Message for an exception of a user's file: its line and what to do; for an unknown field, the nearest names."""
    match = re.search(r"([\w.]+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    match = match or re.search(r"'(\w+)' object has no attribute '(\w+)'", str(error))
    known = _fields_of(match[1], error) if match else []
    if not match or not known:
        return f"{described(error)}{raised_at(error)}; mend the file"
    near = difflib.get_close_matches(match[2], known, 3) or [name for name in known if match[2] in name][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
    return f"{type(error).__name__}: {match[1]} has no field {match[2]!r}{raised_at(error)}; {hint}"


def _fields_of(class_name: str, error: BaseException) -> list[str]:
    """Names of the fields of a dataclass, looked up in the modules that the traceback passed."""
    holder = getattr(error, "obj", None)
    if dataclasses.is_dataclass(holder):
        return [field.name for field in dataclasses.fields(holder)]
    import torchtitan.config

    import torchtitan_rl.config

    first, *rest = class_name.split(".")
    places: list[dict[str, Any]] = [vars(torchtitan_rl.config), vars(torchtitan.config)]
    traced = error.__traceback__
    while traced is not None:
        names = traced.tb_frame.f_globals
        places += [names, *(vars(value) for value in names.values() if isinstance(value, ModuleType))]
        traced = traced.tb_next
    for place in places:
        candidate = place.get(first)
        for part in rest:
            candidate = getattr(candidate, part, None)
        if dataclasses.is_dataclass(candidate):
            return [field.name for field in dataclasses.fields(candidate)]
    return []
