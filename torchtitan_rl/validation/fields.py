"""Checks of each field of a config by itself: its name, its type, and the constraints beside it."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import numbers
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtitan_rl.config.values import field_types
from torchtitan_rl.constraints import complaint

__all__ = ["check_fields"]


def check_fields(config: Any, prefix: str = "") -> None:
    """Raises ValueError for the first field, in the order of definition, whose value is of another type or is refused
    by the field's constraints, and for a name that is no field. `prefix` is the path of `config`, such as `trainer.`.

    Sections in the config, in a dictionary of it too, are checked field by field.
    """
    try:
        hints = field_types(type(config), constraints=True)
    except Exception:  # a user's class may name a type that exists for a type checker only
        hints = {}
    _check_names(config, prefix)
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), f"{prefix}{field.name}"
        if field.name.startswith("_"):
            continue
        if field.name == "task" or prefix.endswith("tasks."):
            _check_task(where, value)
        kind = hints.get(field.name, Any)
        if value is not field.default:
            _check_type(where, value, kind)
        if problem := complaint(value, kind):
            shown = value if isinstance(value, numbers.Number) else repr(value)
            raise ValueError(f"{where}={shown}: {problem}")
        for path, part in [(where, value), *_entries(where, value)]:
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                check_fields(part, f"{path}.")


def _check_names(config: Any, prefix: str) -> None:
    """Raises ValueError for an attribute that was set under a name like a field's."""
    known = [field.name for field in dataclasses.fields(config)]
    for name in getattr(config, "__dict__", {}):
        if name not in known and (near := difflib.get_close_matches(name, known, 3)):
            raise ValueError(
                f"{prefix}{name}: {type(config).__qualname__} has no such field; did you mean {' or '.join(near)}?"
            )


def _entries(where: str, value: Any) -> list[tuple[str, Any]]:
    return [(f"{where}.{name}", part) for name, part in value.items()] if isinstance(value, dict) else []


def _check_task(where: str, task: Any) -> None:
    if task is None and where != "task":
        return
    name = getattr(task, "__qualname__", type(task).__qualname__)
    if isinstance(task, type):
        config = name if name.endswith("Config") else f"{name}.Config"
        raise ValueError(f"{where}={name}: is a class, not a config of one; write {where.split('.')[-1]}={config}()")
    if not callable(getattr(task, "build", None)):
        hint = f"; write {name}.Config()" if hasattr(type(task), "Config") else "; give a Config with a build() method"
        raise ValueError(f"{where}: is a {name}, which has no build(){hint}")


def _check_type(where: str, value: Any, kind: Any) -> None:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(plain) is dict and get_args(plain)[1] is float:  # of a user's own function it may be a switch, too
        for path, number in _entries(where, value):
            if isinstance(number, str):
                raise ValueError(_of_another_type(path, number, float))
    if not _fits(value, plain):
        raise ValueError(_of_another_type(where, value, plain))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a field of type `kind` takes a value; a type that is not known here takes every value."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fits(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is tuple:
        each = arguments if Ellipsis not in arguments else arguments[:1] * len(value)
        return isinstance(value, (tuple, list)) and len(value) == len(each) and all(map(_fits, value, each))
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_fits(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and (
            arguments[1] is float or all(_fits(v, arguments[1]) for v in value.values())
        )
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        wanted = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, wanted) and not isinstance(value, bool)
    if kind is str or isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return isinstance(value, kind)
    return True  # functions have checks of their own


def _of_another_type(where: str, value: Any, kind: Any) -> str:
    shown = repr(value) if not dataclasses.is_dataclass(value) else f"{type(value).__name__}(...)"
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    origin, last = get_origin(kind), where.split(".")[-1]
    if origin is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        near = difflib.get_close_matches(str(value), choices, 3)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?" if near else f"use one of {', '.join(map(repr, choices))}"
        )
        return f"{where}={shown}: there is no such choice; {hint}"
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        return f"{where}={value.__name__}: is a class; write {last}={value.__name__}()"
    hint = "give a value of that type"
    for plain in (int, float):
        if isinstance(value, str) and plain in (kind, *get_args(kind)):
            try:
                hint = f"write {last}={plain(value)!r}, without quotes"
                break
            except ValueError:
                pass
    return f"{where}={shown}: is of type {type(value).__name__}, the field takes {_name(kind)}; {hint}"


def _name(kind: Any) -> str:
    if kind in (Callable, collections.abc.Callable):
        return "a function"
    if get_args(kind):
        return str(kind).replace("typing.", "").replace("torchtitan_rl.config.", "")
    return getattr(kind, "__name__", str(kind))
