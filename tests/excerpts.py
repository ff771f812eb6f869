"""Code that pages quote from the package. `python -m tests.excerpts` brings the quotes up to date.

A page names the file and the function in the line above the block::

    `torchtitan_rl/train/step.py`, `training_data`

The block is the whole function, decorators and docstring included, without the indentation of a class. A test compares
every block with the file.
"""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "one_step.md"
EXCERPT = re.compile(
    r"^(`(torchtitan_rl/[\w/]+\.py)`, `([\w.]+)`\n\n```python check\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE
)


def function_source(file: str, qualified_name: str) -> str:
    """The text of a function or method in a file, without the indentation of its class. Raises ValueError where the
    file has no such function."""
    text = (ROOT / file).read_text()
    node: ast.AST = ast.parse(text)
    for name in qualified_name.split("."):
        named = (child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name)
        node = next(named, None)
        if node is None:
            raise ValueError(f"{file}: has no {qualified_name}; name another function in {PAGE.name}")
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno]))


def refreshed(page: str) -> str:
    """The text of a page with every quote as the code stands now."""
    return EXCERPT.sub(lambda match: match[1] + function_source(match[2], match[3]) + match[5], page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
