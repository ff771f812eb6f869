"""What the linters do not check of structure and words. `scripts/check.sh` runs this: a line for each fault, and
status 1.

    .venv/bin/python scripts/structure.py

- A file name occurs once, but for the shapes in `SHAPES` that repeat in each folder on purpose.
- A base has two real implementations, or users subclass it and its docstring says so. A class that is made, caught or
  handed over as a class is an implementation itself, beside that of its one subclass.
- No module replaces a name of another module at run time, but for `adapters.py`, and for the hooks in `HOOKS`.
- Names are nouns and verbs of the field: no binding is called one of `WORDS`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_rl"
FOLDERS = ("benchmarks", "configs", "environments", "scripts")
"""Further folders whose names are looked at."""

SHAPES = {
    "__init__": "packages",
    "__main__": "packages that are programs",
    "app": "the ASGI application of each server",
    "requests": "the requests of each door",
}
"""File name -> the shape that repeats."""
SECTIONS = ("config", "validation")
"""Rooms with a file per section of a run's config, named after the section or after the room that it configures."""

HOOKS = {
    "monarch.actor.unhandled_fault_hook": "Monarch asks for its replacement",
    "sys.breakpointhook": "Python asks for its replacement",
    "dynamo.recompile_limit": "a setting, which a block sets and restores",
    "dynamo.accumulated_recompile_limit": "a setting, which a block sets and restores",
}
"""Name that a module may set in another -> why."""

WORDS = {
    "found": "name the thing that was looked for: `checkpoint`, `match`, `rows`",
    "told": "name the message or its reader: `text`, `listener`",
    "held": "name what is kept: `loaded_tensors`, `kept`",
    "asked": "name the request: `request`, `requests`",
    "said": "name the words: `message`, `reason`",
    "given": "name the argument: `value`, `arguments`",
    "what": "name the thing: `record`, `fields`, `item`",
    "which": "name the choice: `name`, `index`",
    "others": "name the rest: `siblings`, `remaining`",
}
"""Word -> what to write instead."""

ASK_OF_A_CLASS = {"isinstance", "issubclass", "cast"}
"""Functions whose argument stays a mere name of a type."""

PUBLIC_WORDS = {("rule.py", "what"): "a key of `diagnose --json`, which programs of users read"}
"""(file, name) that stays -> why."""


def main() -> int:
    modules = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    faults = [*repeated_names(modules), *single_subclasses(modules)]
    for path, tree in modules.items():
        faults += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in replaced_functions(path, tree)]
    read_by_users = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path, tree in [*modules.items(), *((path, ast.parse(path.read_text())) for path in read_by_users)]:
        faults += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in vague_names(path, tree)]
    print(*faults, sep="\n" if faults else "")
    print(f"structure: {len(modules)} modules, {len(faults)} faults")
    return 1 if faults else 0


def repeated_names(modules: dict[Path, ast.Module]) -> Iterator[str]:
    places = defaultdict(list)
    for path in modules:
        if path.stem not in SHAPES and path.parent.name not in SECTIONS:
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    for paths in places.values():
        if len(paths) > 1:
            yield f"{', '.join(paths)}: the same file name; name each after its own noun"


def single_subclasses(modules: dict[Path, ast.Module]) -> Iterator[str]:
    nodes = [(path, node) for path, tree in modules.items() for node in ast.walk(tree)]
    subclasses, used = Counter[str](), set[str]()
    for _, node in nodes:
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            subclasses.update(base.id for base in bases if isinstance(base, ast.Name))
        else:
            used.update(_used_as_class(node))
    for path, node in nodes:
        if not isinstance(node, ast.ClassDef) or subclasses[node.name] != 1 or node.name in used:
            continue
        if "users subclass" not in (ast.get_docstring(node) or "").lower():
            place = path.relative_to(ROOT)
            yield f"{place}:{node.lineno}: {node.name}: has one subclass; make the two one class, or say that users do"


def _used_as_class(node: ast.AST) -> Iterator[str]:
    """The names that a node makes an object of, catches, or hands over as a class or as a class's `Config`, of which
    torchtitan makes a module."""
    values: list[ast.expr | None] = []
    if isinstance(node, ast.Call):
        values = [node.func] if ast.unparse(node.func) in ASK_OF_A_CLASS else [node.func, *node.args]
    elif isinstance(node, ast.ExceptHandler):
        values = [*node.type.elts] if isinstance(node.type, ast.Tuple) else [node.type]
    elif isinstance(node, ast.Dict):
        values = [*node.values]
    elif isinstance(node, (ast.Assign, ast.Return)):
        values = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
    for value in values:
        if isinstance(value, ast.Attribute) and value.attr == "Config":
            value = value.value
        if isinstance(value, ast.Name):
            yield value.id


def replaced_functions(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if path.name == "adapters.py":
        return
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute) or ast.unparse(target) in HOOKS:
                    continue
                if _root(target) in imported:
                    yield node.lineno, f"{ast.unparse(target)}: is replaced at run time; do it in adapters.py, or not"


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def vague_names(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if (word := name.strip("_").lower()) in WORDS and (path.name, name) not in PUBLIC_WORDS:
            yield getattr(node, "lineno", 0), f"{name}: says nothing; {WORDS[word]}"


if __name__ == "__main__":
    sys.exit(main())
