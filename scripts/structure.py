"""What the linters do not check of structure and words. `scripts/check.sh` runs this: a line for each fault, and
status 1.

    .venv/bin/python scripts/structure.py

- A file name occurs once, but for the shapes in `SHAPES` that repeat in each folder on purpose.
- No class has a single subclass, unless users subclass it and its docstring says so.
- No module replaces a name of another module at run time, but for `adapters.py`, and for the hooks in `HOOKS`.
- Names are nouns and verbs of the field: no binding is called one of `WORDS`, no variable begins with `of_`.
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
    "made": "name the result: `message`, `table`",
}
"""Word -> what to write instead."""

_PASSED_ON = 3
"""How often a name may be imported from a module that has imported it itself."""

PUBLIC_WORDS = {
    ("rule.py", "what"): "a key of `diagnose --json`, which programs of users read",
    ("certificate.py", "made"): "a key of the certificates in docs/families, the date of each",
}
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
    classes = {name: (path, node) for path, tree in modules.items() for name, node in _classes(_module(path), tree)}
    names = {_module(path): _names(_module(path), tree) for path, tree in modules.items()}
    subclasses = Counter[str]()
    for path, node in classes.values():
        subclasses.update(_class_of(base, _module(path), names) for base in node.bases)
    for name, (path, node) in classes.items():
        if subclasses[name] == 1 and "users subclass" not in (ast.get_docstring(node) or "").lower():
            place = path.relative_to(ROOT)
            yield f"{place}:{node.lineno}: {node.name}: has one subclass; make the two one class, or say that users do"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _classes(scope: str, node: ast.AST) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of a module by their dotted names, nested ones too."""
    for child in ast.iter_child_nodes(node):
        inner = f"{scope}.{child.name}" if isinstance(child, ast.ClassDef) else scope
        if isinstance(child, ast.ClassDef):
            yield inner, child
        yield from _classes(inner, child)


def _names(module: str, tree: ast.Module) -> dict[str, str]:
    """Name in a module -> the dotted name of what it imports or defines."""
    names = {child.name: f"{module}.{child.name}" for child in tree.body if isinstance(child, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _class_of(base: ast.expr, module: str, names: dict[str, dict[str, str]]) -> str:
    """The dotted name of a base, where it is defined: packages pass names on."""
    first, *path = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
    name = ".".join([names[module].get(first, first), *path])
    for _ in range(_PASSED_ON):
        owner, _, last = name.rpartition(".")
        name = names.get(owner, {}).get(last, name)
    return name


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
        if (word := name.strip("_").lower().removesuffix("_t")) in WORDS and (path.name, name) not in PUBLIC_WORDS:
            yield getattr(node, "lineno", 0), f"{name}: says nothing; {WORDS[word]}"
        if name.startswith("of_") and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 0), f"{name}: says whose and not what; name the thing first: `run_values`"


if __name__ == "__main__":
    sys.exit(main())
