"""A config as plain data: its leaves by dotted path, its functions by name and source."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record.user_code import defined_at

__all__ = ["OF_OBJECT", "flat", "function_name", "is_function", "named", "resolved", "rebuilt"]

OF_OBJECT = " of an object"


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field that is no section, in the order of definition."""
    items = (
        config.items()
        if isinstance(config, dict)
        else ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config) if not f.name.startswith("_"))
    )
    for name, value in items:
        path = f"{prefix}{name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type) or isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def function_name(function: Callable) -> str:
    """`module:qualname`, partial arguments included: literals as they are written, a function as
    `function('module:qualname')`, which `config.values` reads back. A method of an object ends in `OF_OBJECT`: its name
    alone is another function, and nothing names the object."""
    if isinstance(function, functools.partial):
        keywords = (f"{name}={_argument(value)}" for name, value in function.keywords.items())
        return f"{function_name(function.func)}({', '.join([*map(_argument, function.args), *keywords])})"
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    return f"{name}{OF_OBJECT}" if inspect.ismethod(function) and not inspect.isclass(function.__self__) else name


def _argument(value: Any) -> str:
    if callable(value):
        return f"function({function_name(value)!r})"
    if type(value) is list:
        return f"[{', '.join(map(_argument, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_argument(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _functions_in(value: Any) -> list[Callable]:
    """The functions that an argument is or, in lists, tuples and dictionaries, has."""
    if callable(value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [function for item in items for function in _functions_in(item)]


def named(function: Callable) -> str:
    """`module:qualname`, and for a function of the user's own its file and line."""
    return f"{function_name(function)}{defined_at(function)}"


def resolved(config: RunConfig) -> dict[str, Any]:
    """The config as plain data for the run directory: a function becomes its name and a hash of its source, and where
    it is a partial with functions among its arguments, the hashes of their sources too."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            entries = {
                f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.name.startswith("_")
            }
            return {"class": f"{type(value).__module__}:{type(value).__qualname__}", **entries}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if callable(value):
            source, *argument_sources = _hashes(value)
            arguments = {"argument_sha256": argument_sources} if argument_sources else {}
            return {"function": function_name(value), "source_sha256": source, **arguments}
        return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)

    return plain(config)


def is_function(value: Any) -> bool:
    """Whether plain data is a function that `resolved` made plain."""
    return isinstance(value, dict) and {"function", "source_sha256"} <= value.keys()


def _hashes(function: Callable) -> list[str]:
    """The hash of a function's source, and those of the functions among a partial's arguments; "" where the source
    cannot be read."""
    if isinstance(function, functools.partial):
        arguments = _functions_in([*function.args, *function.keywords.values()])
        return [sha256 for part in (function.func, *arguments) for sha256 in _hashes(part)]
    try:
        return [_source_sha256(function)]
    except (OSError, TypeError):
        return [""]


@functools.cache
def _source_sha256(function: Callable) -> str:
    """Cached: the source is that of the function that was imported, whatever its file holds by now."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def rebuilt(value: Any, *, trusted: bool = True) -> Any:
    """The object that `resolved` made plain: sections become dataclasses again, importable functions themselves. A
    tuple stays a list.

    `trusted=False` reads what somebody else may have written: it imports data classes and functions of
    `torchtitan_rl.config` and of torchtitan, and nothing else. Raises ValueError for a class or function that cannot be
    imported.
    """
    if isinstance(value, dict) and "class" in value:
        fields = {name: rebuilt(item, trusted=trusted) for name, item in value.items() if name != "class"}
        return _imported(value["class"], trusted, kind=type)(**fields)
    if is_function(value):
        return _imported(value["function"], trusted, kind=FunctionType)
    if isinstance(value, dict):
        return {name: rebuilt(item, trusted=trusted) for name, item in value.items()}
    return [rebuilt(item, trusted=trusted) for item in value] if isinstance(value, list) else value


_PACKAGES = ("torchtitan_rl.config.", "torchtitan_rl.families.", "torchtitan.")
"""Where the data classes and functions of a config come from that nobody vouches for."""


def _imported(name: Any, trusted: bool, kind: type) -> Any:
    module, _, qualname = str(name).partition(":")
    refusal = (
        f"config: {name!r} is no class of a config in torchtitan_rl or torchtitan, and nothing of it was run; where "
        "you know who wrote the file, add --trust-code"
    )
    if not trusted and not f"{module}.".startswith(_PACKAGES):
        raise ValueError(refusal)
    try:
        imported: Any = importlib.import_module(module)
        for part in qualname.split("."):
            imported = getattr(imported, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"config: {name!r} cannot be imported ({error}); put its module on the path") from error
    # Not what a module of ours has imported itself, such as `config.resolve:importlib.import_module`.
    ours = isinstance(imported, kind) and (kind is not type or dataclasses.is_dataclass(imported))
    if not trusted and not (ours and f"{imported.__module__}.".startswith(_PACKAGES)):
        raise ValueError(refusal)
    return imported
