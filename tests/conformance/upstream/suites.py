"""The tests of others that are run against a server: which files, in what surroundings."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SUITES", "Suite"]

_HERE = Path(__file__).parent
_MODEL = (
    re.compile(r'((?:model|MODEL_NAME)\s*=\s*)"[^"]+"'),
    re.compile(r'(models\.(?:with_\w+\.)?(?:retrieve|delete)\(\s*)"[^"]+"'),
)
"""Where a test names the model that it asks for."""


@dataclass(frozen=True)
class Suite:
    """Tests of one project."""

    tests: tuple[str, ...]
    """Files and directories below the project's `tests` that are run."""
    support: tuple[str, ...]
    """What they import besides, there."""
    settings: str
    """pytest.ini."""
    has_stand_in: bool = False
    """Whether `remote_server` stands in for `tests.utils`."""

    def copy(self, project: Path, directory: Path, model: str) -> list[str]:
        """Copies the tests, with the server's model in place of theirs. Returns their paths in `directory`. Raises
        ValueError for a project that lacks them."""
        for name in (*self.tests, *self.support):
            source, target = project / "tests" / name, directory / "tests" / name
            if not source.exists():
                raise ValueError(f"directory={str(project)!r}: has no tests/{name}; give the root of a checkout")
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, target)
        if self.has_stand_in:
            shutil.copyfile(_HERE / "remote_server.py", directory / "tests" / "utils.py")
            for package in {path.parent for path in (directory / "tests").rglob("*.py")} | {directory / "tests"}:
                while package != directory:
                    (package / "__init__.py").touch()
                    package = package.parent
        for path in (directory / "tests").rglob("test_*.py"):
            text = path.read_text()
            for named in _MODEL:
                text = named.sub(rf'\1"{model}"', text)
            path.write_text(text)
        (directory / "pytest.ini").write_text(f"[pytest]\n{self.settings}\n")
        return [str(directory / "tests" / name) for name in self.tests]


SUITES = {
    "openai": Suite(
        tests=(
            *("api_resources/chat", "api_resources/responses", "api_resources/test_completions.py"),
            *("api_resources/test_models.py", "api_resources/test_responses.py"),
        ),
        support=("__init__.py", "conftest.py", "utils.py", "respx2", "api_resources/__init__.py"),
        settings="asyncio_mode = auto\nasyncio_default_fixture_loop_scope = session",
    ),
    "vllm": Suite(
        tests=(
            "entrypoints/anthropic/test_messages.py",
            *(
                f"entrypoints/openai/responses/test_{name}.py"
                for name in (
                    *("basic", "function_call", "namespace_tool_separator", "parsable_context", "simple", "stateful"),
                    "structured_output",
                )
            ),
        ),
        support=("entrypoints/openai/responses/conftest.py",),
        settings="asyncio_mode = strict\nasyncio_default_fixture_loop_scope = function",
        has_stand_in=True,
    ),
}
"""Of openai-python the endpoints that agents ask: the other tests are of files, images, audio and the like. Of vLLM the
files that ask a server: the others beside them call vLLM's own functions, or speak gpt-oss' format."""
