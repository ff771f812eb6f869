"""How much of the package a reader of one reinforcement step has to know: files and functions entered, in lines.

    .venv/bin/python scripts/reading_budget.py [CONFIG]

Two steps of the reinforcement phase of CONFIG (the quickstart) run on the local backend, without warm start and without
evaluations, on four tasks each. The last line of the output is JSON: `files` in which a function was called,
`file_lines` of those files, `function_lines` of the called functions.
"""

from __future__ import annotations

import ast
import asyncio
import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent


class Profile:
    """Code objects of the package that were called while `on`."""

    def __init__(self) -> None:
        self.on, self.called = False, set[CodeType]()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.called.add(frame.f_code)


def lines_of_functions(path: Path, firsts: set[int]) -> int:
    """Lines of a file's functions that begin, decorators included, at one of these lines; a nested one counts once."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in firsts:
                lines.update(range(first, (node.end_lineno or first) + 1))
    return len(lines)


async def step(config_file: str, profile: Profile) -> None:
    from torchtitan_rl import Controller, load_config

    config = load_config(config_file)
    config.supervised.num_steps = config.controller.eval_every = 0
    config.controller.num_steps, config.algorithm.tasks_per_step = 2, 4
    config.algorithm.tasks_per_minibatch, config.algorithm.num_epochs = 0, 1
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        config.output_dir = f"{directory}/run"
        async with await Controller.launch(config, backend="local") as controller:
            profile.on = True
            sys.setprofile(profile)  # no earlier: imports take twice as long under a profile
            await controller.reinforce()
            sys.setprofile(None)
            profile.on = False


def measured(config_file: str) -> tuple[list[tuple[int, int, str]], dict[str, int]]:
    """Per file (lines of called functions, lines, name), most first, and the sums. For a process without a local
    run."""
    profile = Profile()
    threading.setprofile(profile)  # the engine's thread too
    asyncio.run(step(config_file, profile))
    threading.setprofile(None)
    firsts: dict[Path, set[int]] = defaultdict(set)
    for code in profile.called:
        if not code.co_name.startswith("<"):  # lambdas and comprehensions are lines of the function around them
            firsts[Path(code.co_filename)].add(code.co_firstlineno)
    rows = [
        (lines_of_functions(path, lines), path.read_text().count("\n"), str(path.relative_to(PACKAGE)))
        for path, lines in firsts.items()
        if path.name != "__init__.py"
    ]
    sums = {"files": len(rows), "file_lines": sum(r[1] for r in rows), "function_lines": sum(r[0] for r in rows)}
    return sorted(rows, reverse=True), sums


def main() -> None:
    rows, sums = measured(sys.argv[1] if len(sys.argv) > 1 else "configs/quickstart.py")
    for entered, whole, name in rows:
        print(f"{entered:5d} of {whole:5d}  {name}")
    print(json.dumps(sums))


if __name__ == "__main__":
    main()
