"""The config of a run that is on disk, as an object again."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from torchtitan_rl.config.config_difference import differences
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.python_file import MODULE_PREFIX
from torchtitan_rl.config.resolve import is_function, rebuilt, resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.values import field_types, function_of

__all__ = ["recorded_config"]


def recorded_config(plain: dict[str, Any], where: str) -> tuple[RunConfig, dict[str, tuple[Any, Any]]]:
    """The config that `resolve.resolved` made plain, and the functions whose source has changed since: dotted path ->
    (hash then, hash now), and for the functions among a partial's arguments lists of hashes.

    Functions and classes are imported; those of a user's file must be loaded already (`load.load_config`). Raises
    ValueError for what cannot be imported and for a value that cannot be read back; the message begins with `where`.
    """
    if missing := sorted(set(_modules_of_files(plain)) - sys.modules.keys()):
        file = f"{missing[0].removeprefix(MODULE_PREFIX)}.py"
        raise ValueError(
            f"{where}: names functions or classes of {file}, the file that the run was started with; give it as "
            f"--config {file}"
        )
    try:
        config = rebuilt(_with_functions(plain, where))
    except TypeError as error:  # a field that this version of the package does not have
        raise ValueError(f"{where}: was written by another version ({error}); use that version") from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"{where}: is not the config of a run; give a run directory")
    _restore_tuples(config)
    changed = differences(plain, resolved(settled(config)))
    for path, (before, now) in changed.items():
        if not path.endswith((".source_sha256", ".argument_sha256")):
            raise ValueError(f"{where}: {path} was {before!r} and reads back as {now!r}; it cannot be read from there")
    return config, changed


def _restore_tuples(part: Any) -> None:
    """Makes tuples again of lists in fields that are declared as tuples, which JSON does not tell apart. An optimizer's
    state in a checkpoint does."""
    if isinstance(part, dict):
        for value in part.values():
            _restore_tuples(value)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return
    try:
        kinds = field_types(type(part))
    except Exception:  # a user's class may name a type that exists for a type checker only
        kinds = {}
    for field in dataclasses.fields(part):
        value, kind = getattr(part, field.name), kinds.get(field.name)
        if isinstance(value, list) and any(get_origin(choice) is tuple for choice in (kind, *get_args(kind))):
            setattr(part, field.name, tuple(value))
        else:
            _restore_tuples(value)


def _with_functions(value: Any, where: str) -> Any:
    """The plain data with functions in the place of their names, which may have arguments."""
    if is_function(value):
        return function_of(where, value["function"])
    if isinstance(value, dict):
        return {name: _with_functions(item, where) for name, item in value.items()}
    return [_with_functions(item, where) for item in value] if isinstance(value, list) else value


def _modules_of_files(value: Any) -> Iterator[str]:
    """The modules of users' files whose classes and functions plain data name."""
    if isinstance(value, dict):
        names = (value[key] for key in ("class", "function") if isinstance(value.get(key), str))
        yield from (module for module, _, _ in (name.partition(":") for name in names) if _is_of_file(module))
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _modules_of_files(item)


def _is_of_file(module: str) -> bool:
    return module.startswith(MODULE_PREFIX)
