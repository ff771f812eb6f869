"""Config files, and overrides from the shell.

Loading, showing and validating a config imports neither vLLM nor Monarch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_type_hints

import cloudpickle

from torchtitan_rl.config.resolve import flat
from torchtitan_rl.config.run import RunConfig

__all__ = ["load_config", "apply_overrides"]


def load_config(path: str) -> RunConfig:
    """The config that a file's `config()` returns. Raises ValueError for a missing or broken file."""
    file = Path(path)
    if not file.is_file():
        near = (
            difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], 1)
            if file.parent.is_dir()
            else []
        )
        raise ValueError(
            f"config={path!r}: there is no such file"
            + (
                f"; did you mean {file.parent / near[0]}?"
                if near
                else "; give the path of a Python file with a config() function"
            )
        )
    module_name = f"torchtitan_rl_config_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None:
        raise ValueError(f"config={path!r}: is not a Python file; give a .py file with a config() function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"config={path!r}: importing it raised {_one_line(error)}; mend the file") from error
    if not callable(getattr(module, "config", None)):
        raise ValueError(f"config={path!r}: defines no config(); add `def config() -> RunConfig:`")
    try:
        config = module.config()
    except Exception as error:
        raise ValueError(f"config={path!r}: config() raised {_one_line(error)}; mend the file") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"config={path!r}: config() returned a {type(config).__name__}; return a RunConfig")
    cloudpickle.register_pickle_by_value(module)  # functions of this file travel to actors by value
    return config


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def apply_overrides(config: RunConfig, arguments: list[str]) -> None:
    """Sets existing fields from `--field.path value` (or `=value`), parsed by tyro as the field's type.

    Raises ValueError for a field that does not exist (with the nearest name) or a value of the wrong type.
    """
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)  # every word up to the next flag is the value: --betas 0.9 0.99
        if not flag.startswith("--"):
            raise ValueError(f"argument={flag!r}: is not an override; write --field.path value")
        path, equals, value = flag[2:].partition("=")
        if not equals:
            words = []
            while remaining and not remaining[0].startswith("--"):
                words.append(remaining.pop(0))
            if not words:
                raise ValueError(f"{flag}: has no value; write {flag} VALUE")
            value = " ".join(words)
        _set(config, path, value)


def _set(config: RunConfig, shown: str, text: str) -> None:
    *parents, last = shown.replace("-", "_").split(".")
    target: Any = config
    for depth, name in enumerate(parents, start=1):
        _require_field(config, target, name, shown, text)
        target = target[name] if isinstance(target, dict) else getattr(target, name)
        if target is None:
            raise ValueError(
                f"--{shown}={text}: {'.'.join(parents[:depth])} is None in this config, and overrides add "
                "nothing; set it in the config file"
            )
    _require_field(config, target, last, shown, text)
    held = target[last] if isinstance(target, dict) else getattr(target, last)
    if dataclasses.is_dataclass(held):
        example = next(path for path, _ in flat(held)).replace("_", "-")
        raise ValueError(f"--{shown}={text}: is a section; set one of its fields, such as --{shown}.{example}")
    value = _parse(_fields(target)[last], shown, text)
    if isinstance(target, dict):
        target[last] = value
    else:
        setattr(target, last, value)


def _require_field(config: RunConfig, target: Any, name: str, shown: str, text: str) -> None:
    if name in _fields(target):
        return
    every = [path for path, _ in flat(config)]
    wanted = shown.replace("-", "_")
    same_leaf = [path for path in every if path.rsplit(".", 1)[-1] == wanted.rsplit(".", 1)[-1]]
    near = [path for path in same_leaf if "." not in wanted or path.startswith(wanted.split(".", 1)[0] + ".")]
    near = near or difflib.get_close_matches(wanted, every, 1) or same_leaf
    hint = (
        f"; did you mean --{near[0].replace('_', '-')}?" if near else "; `torchtitan-rl show CONFIG` lists all fields"
    )
    raise ValueError(f"--{shown}={text}: there is no such field{hint}")


def _fields(target: Any) -> dict[str, Any]:
    """The settable names of a config object, each with its type."""
    if isinstance(target, dict):
        return {name: float if type(value) is int else type(value) for name, value in target.items()}
    if not dataclasses.is_dataclass(target):
        return {}
    hints = get_type_hints(type(target))
    return {f.name: hints[f.name] for f in dataclasses.fields(target) if not f.name.startswith("_")}


def _parse(kind: Any, shown: str, text: str) -> Any:
    import tyro

    errors = io.StringIO()
    try:
        with redirect_stderr(errors), redirect_stdout(errors):
            words = text.split() if _takes_several(kind) else [text]
            if kind is bool:
                words = [text.capitalize()]
            args = ["--", *words] if text.startswith("-") else words
            return tyro.cli(tyro.conf.Positional[kind], args=args)  # type: ignore[misc]  # a type known at run time only
    except (SystemExit, Exception):
        name = getattr(kind, "__name__", None) if not hasattr(kind, "__args__") else str(kind).replace("typing.", "")
        raise ValueError(f"--{shown}={text}: is not of type {name or kind}; give a value of that type") from None


def _takes_several(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) in (tuple, list)
