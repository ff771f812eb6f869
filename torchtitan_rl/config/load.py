"""Config files.

Loading, showing and validating a config imports neither vLLM nor Monarch.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from types import ModuleType

from torchtitan_rl.config.overrides import apply_overrides
from torchtitan_rl.config.python_file import load_module, mistake
from torchtitan_rl.config.run import RunConfig

__all__ = ["apply_overrides", "load_config", "load_functions"]


def load_config(path: str) -> RunConfig:
    """The config that a file's `config()` returns. Raises ValueError for a missing or broken file."""
    module = load_functions(path)
    if not callable(getattr(module, "config", None)):
        raise ValueError(f"config={path!r}: defines no config(); add `def config() -> RunConfig:`")
    try:
        config = module.config()
    except (Exception, SystemExit) as error:
        raise ValueError(f"config={path!r}: config() raised {mistake(error)}") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"config={path!r}: config() returned a {type(config).__name__}; return a RunConfig")
    return config


def load_functions(path: str) -> ModuleType:
    """The module of a user's file, whose functions a recorded config names. Raises ValueError for a missing or broken
    file."""
    file = Path(path)
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, beside, 3)
        hint = "give the path of a Python file with a config() function"
        if near:
            hint = f"did you mean {' or '.join(str(file.parent / name) for name in near)}?"
        raise ValueError(f"config={path!r}: there is no such file; {hint}")
    return load_module(file, f"config={path!r}")
