"""The code blocks of the pages at the top and of docs/. `python -m tests.examples [PAGE ...]` runs the slow ones.

A word after a block's language says that the suite does not run the block: `slow` ones take longer than 20 s; `check`
ones need a GPU, several hosts, a network or another library, or start the suite.
"""

import ast
import asyncio
import inspect
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
OWN_TEST = ("docs/mistakes.md",)  # tests/unit/test_mistakes.py makes the mistakes of its blocks
TOP = ("README.md", "CONTRIBUTING.md", "AGENTS.md")
PAGES = [*TOP, *sorted({str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")} - {*OWN_TEST})]
MARKS = ("slow", "check")


@dataclass
class Block:
    place: str  # PAGE:LINE of the first line of code
    language: str
    mark: str
    code: str

    def compiled(self):
        lines = "\n" * (int(self.place.rsplit(":", 1)[1]) - 1)  # a traceback names the page's line
        return compile(lines + self.code, self.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    def commands(self) -> list[list[str]]:
        """The arguments of each line that calls `torchtitan-rl`."""
        words = [shlex.split(line, comments=True) for line in self.code.replace("\\\n", " ").splitlines()]
        return [line[1:] for line in words if line and line[0].endswith("torchtitan-rl")]


def blocks(page: str, language: str) -> list[Block]:
    """A page's blocks in `bash` or `python`, in order."""
    fences = [token for token in MarkdownIt().parse((ROOT / page).read_text()) if token.type == "fence"]
    found = [(fence.map[0] + 2, *(fence.info.split() + ["", ""])[:2], fence.content) for fence in fences]
    return [Block(f"{page}:{line}", kind, mark, code) for line, kind, mark, code in found if kind == language]


def run_python(block: Block, scope: dict, loop: asyncio.AbstractEventLoop) -> None:
    """Runs a block as a notebook would: with names that earlier blocks of its page left, `await` anywhere."""
    if inspect.iscoroutine(result := eval(block.compiled(), scope)):
        loop.run_until_complete(result)


def checkout(directory: Path) -> None:
    """Makes an empty directory look like a checkout after `scripts/setup.sh`, without runs."""
    for path in ROOT.iterdir():
        if path.name not in (".venv", "runs"):
            (directory / path.name).symlink_to(path)
    (directory / ".venv").symlink_to(sys.prefix)


def main(pages: list[str]) -> int:
    """Runs the slow blocks of pages for the shell, in one directory. Returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-docs-") as directory:
        checkout(Path(directory))
        env = os.environ | {"PATH": f"{directory}/.venv/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        for block in [block for page in pages for block in blocks(page, "bash") if block.mark == "slow"]:
            print(f"== {block.place}\n{block.code}", flush=True)
            done = subprocess.run(["bash", "-ec", block.code], cwd=directory, env=env, stdin=subprocess.DEVNULL)
            failed += done.returncode != 0
            print(f"== {block.place}: status {done.returncode}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PAGES))
