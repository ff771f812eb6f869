"""Overrides from the shell: `--field.path value`, in every form that `torchtitan-rl show` prints."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.resolve import flat
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.values import field_types, is_switch, parsed, words_of

__all__ = ["apply_overrides"]


def apply_overrides(config: RunConfig, arguments: list[str], options: Sequence[str] = ()) -> None:
    """Sets fields from `--field.path value` (or `=value`); `--field` and `--no-field` set a boolean. A field of a part
    that is None switches the part on. Roles come last, because a role begins with the policy's trainer.

    Raises ValueError for a field that does not exist (with the nearest names) or a value of the wrong type. `options`
    are those of the verb, such as `--dry-run`: a misspelt one arrives here.
    """
    for word in arguments:
        if near := _near_option(config, word.partition("=")[0], options):
            raise ValueError(f"{word}: there is no such option; did you mean {near}?")
    overrides = list(_split_overrides(config, arguments))
    for path, words in sorted(overrides, key=lambda item: item[0].replace("_", "-").startswith("roles.")):
        _set(config, path, words)


def _near_option(config: RunConfig, flag: str, options: Sequence[str]) -> str:
    """The verb's option that a flag without a dot is nearest to; empty where the flag is a field, or nearer to one."""
    if not flag.startswith("--") or "." in flag:
        return ""
    top = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(config)]
    near = difflib.get_close_matches(flag.replace("_", "-"), [*options, *top], 1, cutoff=0.7)
    return near[0] if near and near[0] in options and near[0] not in top else ""


def _split_overrides(config: RunConfig, arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(path, words of the value) of every override."""
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)  # every word up to the next flag is the value: --betas 0.9 0.99
        if not flag.startswith("--"):
            raise ValueError(f"argument={flag!r}: is not an override; write --field.path value")
        path, equals, value = flag[2:].partition("=")
        words = [value] if equals else []
        while not equals and remaining and not remaining[0].startswith("--"):
            words.append(remaining.pop(0))
        if not words:
            *parents, last = path.replace("_", "-").split(".")
            positive = ".".join([*parents, last.removeprefix("no-")]).removeprefix("no-")
            if _is_switch(config, path):
                words = ["True"]
            elif positive != path.replace("_", "-") and _is_switch(config, positive):
                path, words = positive, ["False"]
            else:
                raise ValueError(_no_value(config, path))
        yield path, words


def _no_value(config: RunConfig, path: str) -> str:
    """The message for a flag without a value."""
    try:
        _find(config, path, [])
    except ValueError as error:
        return str(error)
    return f"--{path}: has no value; write --{path} VALUE"


def _is_switch(config: RunConfig, path: str) -> bool:
    """Whether a path is a field that takes True or False."""
    try:
        return is_switch(_find(config, path, [], switch_on=False)[2])
    except ValueError:
        return False


def _set(config: RunConfig, shown: str, words: list[str]) -> None:
    text = " ".join(words)
    target, last, kind = _find(config, shown, words)
    current = target.get(last) if isinstance(target, dict) else getattr(target, last)
    section = _section(kind)
    if section is not None and text in ("True", "None", "False"):
        value = (
            None if text != "True" else current if current is not None else _switched_on(config, section, shown, words)
        )
    elif dataclasses.is_dataclass(current):
        example = next(path for path, _ in flat(current)).replace("_", "-")
        raise ValueError(f"--{shown}={text}: is a section; set one of its fields, such as --{shown}.{example}")
    elif words == words_of(current):
        return  # as `show` prints the value, of whatever type
    else:
        value = parsed(kind, f"--{shown}", words, current)
    _put(target, last, value)


def _find(config: RunConfig, shown: str, words: list[str], *, switch_on: bool = True) -> tuple[Any, str, Any]:
    """(section or dictionary, name, type) of a field. A part that is None on the way is switched on, once all of the
    path is known to exist."""
    *parents, last = shown.replace("-", "_").split(".")
    target: Any = config
    fields = _fields(config, RunConfig)
    pending: list[tuple[Any, str, Any]] = []
    for name in parents:
        _require_field(config, fields, name, shown, words)
        kind, child = fields[name], target[name] if isinstance(target, dict) else getattr(target, name)
        if child is None and (section := _section(kind)) is not None:
            child = _switched_on(config, section, shown, words)
            pending.append((target, name, child))
        target, fields = child, _fields(child, kind)
    if isinstance(target, dict) and last not in fields and "*" in fields:
        fields[last] = fields["*"]
    _require_field(config, fields, last, shown, words)
    for holder, name, child in pending if switch_on else ():
        _put(holder, name, child)
    return target, last, fields[last]


def _put(target: Any, name: str, value: Any) -> None:
    if isinstance(target, dict):
        target[name] = value
    else:
        setattr(target, name, value)


def _fields(target: Any, kind: Any) -> dict[str, Any]:
    """The settable names of a config object that its holder declares as `kind`, each with its type; under `*` the type
    of new keys, where `kind` is a dictionary of numbers or texts."""
    if isinstance(target, dict):
        types = {name: float if type(value) is int else type(value) for name, value in target.items()}
        value_type = get_args(kind)[1] if get_origin(kind) is dict else None
        return types | ({"*": value_type} if value_type in (float, int, str, bool) else {})
    if not dataclasses.is_dataclass(target):
        return {}
    hints = field_types(type(target))
    return {f.name: hints[f.name] for f in dataclasses.fields(target) if not f.name.startswith("_")}


def _section(kind: Any) -> type | None:
    """The config class of a part that may be None: C of `C | None`."""
    choices = get_args(kind) if get_origin(kind) is types.UnionType else ()
    return next((c for c in choices if dataclasses.is_dataclass(c) and isinstance(c, type)), None)


def _switched_on(config: RunConfig, section: type, shown: str, words: list[str]) -> Any:
    """A part with its defaults; a role's trainer is the policy's, without adapters."""
    if section is TrainerConfig:
        return config.trainer.of_role()
    needed = [
        field.name
        for field in dataclasses.fields(section)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    if needed:
        raise ValueError(
            f"{_flag(shown, words)}: a {section.__name__} is None in this config and has no defaults for "
            f"{', '.join(needed)}; set it in the config file"
        )
    return section()


def _require_field(config: RunConfig, fields: dict[str, Any], name: str, shown: str, words: list[str]) -> None:
    if name in fields:
        return
    every = [path for path, _ in flat(config)]
    wanted = shown.replace("-", "_")
    same_leaf = [path for path in every if path.rsplit(".", 1)[-1] == wanted.rsplit(".", 1)[-1]]
    near = [path for path in same_leaf if "." not in wanted or path.startswith(wanted.split(".", 1)[0] + ".")]
    close = difflib.get_close_matches(wanted, every, 3, cutoff=0.8) or difflib.get_close_matches(wanted, every, 1)
    offered = [f"--{path.replace('_', '-')}" for path in (near or close or same_leaf)[:3]]
    hint = f"did you mean {' or '.join(offered)}?" if offered else "`torchtitan-rl show CONFIG` lists all fields"
    raise ValueError(f"{_flag(shown, words)}: there is no such field; {hint}")


def _flag(shown: str, words: list[str]) -> str:
    return f"--{shown}" + (f"={' '.join(words)}" if words else "")
