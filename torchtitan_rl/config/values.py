"""Values of config fields as words of a shell line, and back."""

from __future__ import annotations

import ast
import collections.abc
import difflib
import functools
import importlib
import io
import math
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torchtitan_rl.config.meshes import TORCHTITAN_FIELDS
from torchtitan_rl.config.python_file import MODULE_PREFIX, load_module
from torchtitan_rl.config.resolve import OF_OBJECT, function_name

__all__ = ["field_types", "function_of", "is_switch", "module_of_file", "parsed", "shell_text", "words_of"]


def field_types(config_class: type, *, constraints: bool = False) -> dict[str, Any]:
    """Type of every field of a config class; on request as `Annotated`, where the field has constraints."""
    torchtitan_types = TORCHTITAN_FIELDS.get(config_class, {})
    if not constraints:
        torchtitan_types = {name: get_args(kind)[0] for name, kind in torchtitan_types.items()}
    return _hints(config_class, constraints) | torchtitan_types


@functools.cache
def _hints(config_class: Any, constraints: bool) -> dict[str, Any]:
    """The annotations of a class, evaluated once."""
    return get_type_hints(config_class, include_extras=constraints)


def words_of(value: Any) -> list[str]:
    """The words that set a field to `value`, as a program gets them from the shell."""
    if isinstance(value, str):
        return [value if repr(value) == f"'{value}'" and not value.startswith("--") else repr(value)]
    if isinstance(value, (list, tuple)):
        value = [function_name(v) if callable(v) else v for v in value]
        plain = all(isinstance(v, (int, float)) or isinstance(v, str) and re.fullmatch(r"[\w./:]+", v) for v in value)
        return [str(v) for v in value] if value and plain else [repr(list(value))]
    return [function_name(value) if callable(value) else str(value)]


def shell_text(value: Any) -> str:
    """The words that set a field to `value`, as they are typed: texts stand in quotes."""
    words = words_of(value)
    if isinstance(value, str):
        return f"'{words[0]}'" if "'" not in words[0] else shlex.quote(words[0])
    return " ".join(word if word == "[]" else shlex.quote(word) for word in words)


def parsed(kind: Any, flag: str, words: list[str], current: Any = None) -> Any:
    """The value of a field of type `kind`. Raises ValueError for words that are not of that type; the message begins
    with `flag`."""
    text = " ".join(words)
    kinds = [kind, *get_args(kind)] if get_origin(kind) not in (list, tuple, dict) else [kind]
    if text == "None" and type(None) in kinds:
        return None
    if callable(current) or any(k is Callable or k is collections.abc.Callable for k in kinds):
        return function_of(flag, text, current)
    if get_origin(kind) in (list, tuple, dict) and text[:1] in ("[", "(", "{"):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = None
        if not isinstance(value, (list, tuple, dict)):
            advice = "give a value of that type"
            if get_args(kind)[:1] == (str,) and get_origin(kind) is list:
                quoted = f'"{[text]}"' if re.fullmatch(r"[^\"\\$`!]*", text) else shlex.quote(repr([text]))
                advice = f"a text that begins with a bracket is written {quoted}"
            raise ValueError(f"{flag}={text}: is not of type {_kind_name(kind)}; {advice}")
        if isinstance(value, dict):
            return value
        words = [str(item) for item in value]
        if not words:
            return get_origin(kind)()
    elif get_origin(kind) in (list, tuple):
        # A text may hold blanks, as in a stop; numbers and functions in one word are several.
        words = text.split() if len(words) == 1 and get_args(kind)[0] is not str else words
    elif is_switch(kind):
        words = [text.capitalize()]
    else:
        words = [ast.literal_eval(text) if _is_quoted(text) and str in kinds else text]
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is collections.abc.Callable:
        return [function_of(flag, word, None) for word in words]
    return _tyro(kind, flag, text, words)


def is_switch(kind: Any) -> bool:
    """Whether a field of type `kind` takes True or False."""
    return kind is bool or set(get_args(kind)) == {bool, type(None)}


def _tyro(kind: Any, flag: str, text: str, words: list[str]) -> Any:
    """The words parsed by tyro as a type."""
    import tyro

    try:
        errors = io.StringIO()
        with redirect_stderr(errors), redirect_stdout(errors):
            args = ["--", *words] if any(word.startswith("-") for word in words) else words
            return tyro.cli(tyro.conf.Positional[kind], args=args)  # type: ignore[misc]  # a type known at run time only
    except (SystemExit, Exception):
        if get_origin(kind) is Literal:
            choices = ", ".join(map(str, get_args(kind)))
            raise ValueError(f"{flag}={text}: there is no such choice; use one of {choices}") from None
        raise ValueError(f"{flag}={text}: is not of type {_kind_name(kind)}; give a value of that type") from None


def _is_quoted(text: str) -> bool:
    try:
        return text[:1] in ("'", '"') and isinstance(ast.literal_eval(text), str)
    except (ValueError, SyntaxError):
        return False


def _kind_name(kind: Any) -> str:
    if hasattr(kind, "__args__"):
        return str(kind).replace("typing.", "").replace("collections.abc.", "")
    return getattr(kind, "__name__", str(kind))


def function_of(flag: str, text: str, current: Any = None) -> Any:
    """The function of `module:name` or `file.py:name`; with arguments, as in `module:name(std='none')`, a partial. An
    argument that is a function is written `function('module:name')`. `current` is the field's value, for an example.
    Raises ValueError for anything else; the message begins with `flag`."""
    if text.endswith(OF_OBJECT):
        raise ValueError(
            f"{flag}={text}: the object was made where the config was, and nothing names it; give a function of a "
            "module that calls the method"
        )
    example = function_name(current) if callable(current) else "rewards.py:my_function"
    match = re.fullmatch(r"([^:()]+):([\w.]+)(\(.*\))?", text, re.DOTALL)
    if not match:
        raise ValueError(f"{flag}={text}: names no function; write module:name or file.py:name, such as {example}")
    module_name, qualname, arguments = match.groups()
    try:
        module = (
            module_of_file(module_name, f"{flag}={text}") if module_name.endswith(".py") else _imported(module_name)
        )
    except ImportError as error:
        raise ValueError(f"{flag}={text}: {error}; write module:name or file.py:name, such as {example}") from error
    function: Any = module
    for part in qualname.split("."):
        holder, function = function, getattr(function, part, None)
        if function is None:
            near = difflib.get_close_matches(part, vars(holder), 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"name one, such as {example}"
            raise ValueError(f"{flag}={text}: {module_name} has no {qualname}; {hint}")
    if not callable(function):
        raise ValueError(f"{flag}={text}: is a {type(function).__name__}; name a function, such as {example}")
    if arguments is None:
        return function
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
    except (SyntaxError, AssertionError):
        raise _no_literals(flag, text) from None
    positional = [_argument(flag, text, argument) for argument in call.args]
    named = {str(keyword.arg): _argument(flag, text, keyword.value) for keyword in call.keywords}
    return functools.partial(function, *positional, **named)


def _argument(flag: str, text: str, argument: ast.expr) -> Any:
    """The value of a literal, or the function of `function('module:name')`; in lists, tuples and dictionaries too."""
    match argument:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = [_argument(flag, text, item) for item in items]
            return values if isinstance(argument, ast.List) else tuple(values)
        case ast.Dict(keys=keys, values=items) if None not in keys:
            names = (_argument(flag, text, key) for key in keys)
            return {name: _argument(flag, text, item) for name, item in zip(names, items)}
        case ast.Call(func=ast.Name(id="function"), args=[ast.Constant(value=str(name))], keywords=[]):
            return function_of(flag, name, None)
        case ast.Name(id="inf" | "nan" as name):  # as Python prints such a number
            return float(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -math.inf
    try:
        return ast.literal_eval(argument)
    except ValueError:
        raise _no_literals(flag, text) from None


def _no_literals(flag: str, text: str) -> ValueError:
    return ValueError(
        f"{flag}={text}: its arguments are no literals; write name=value, with numbers, texts or "
        "function('module:name')"
    )


def _imported(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)


def module_of_file(path: str, where: str) -> ModuleType:
    """The module of a file; the one that is loaded already, where there is one."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{where}: there is no file {path}; give the path of a Python file")
    loaded = sys.modules.get(f"{MODULE_PREFIX}{file.stem}")
    if loaded is not None and loaded.__file__ is not None and file.samefile(loaded.__file__):
        return loaded
    return load_module(file, where)
