"""Runs tests of others against a server and counts them: passed, refused by design, another model needed, failed.

`python tests/conformance/upstream SUITE DIRECTORY URL [PYTEST ARGUMENT ...]`. Ends with status 1 where a test failed
that `refused.toml` does not explain.
"""

import os
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import openai
import pytest
from suites import SUITES

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Expectation:
    """Why tests fail that should."""

    kind: str
    """`refused`: the server refuses by design. `model`: the test needs what another model says."""
    tests: tuple[str, ...]
    """Patterns of test names, such as `*/test_models.py::*delete*`."""
    says: str
    """What the failure has to say; a test that fails otherwise has failed."""
    reason: str

    def explains(self, test: str, failure: str) -> bool:
        return any(fnmatch(test, pattern) for pattern in self.tests) and self.says in failure


def expectations(suite: str) -> list[Expectation]:
    listed = tomllib.loads((_HERE / "refused.toml").read_text()).get(suite, [])
    return [Expectation(one["kind"], tuple(one["tests"]), one["says"], one["reason"]) for one in listed]


class Counts:
    """A pytest plugin that sorts what happened."""

    def __init__(self, expected: list[Expectation], root: str) -> None:
        self.expected, self.root = expected, root
        self.outcomes: dict[str, str] = {}
        self.explained: dict[Expectation, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.removeprefix(self.root).lstrip("/")
        if report.skipped:
            self.outcomes[name] = "skipped upstream"
        elif report.failed and self.outcomes.get(name) in (None, "passed"):
            said = f"{report.longreprtext}\n{report.capstderr}"
            why = next((one for one in self.expected if one.explains(name, said)), None)
            self.outcomes[name] = "failed" if why is None else why.kind
            if why is not None:
                self.explained[why] += 1
        elif report.when == "call" and report.passed:
            self.outcomes[name] = "passed"

    def pytest_terminal_summary(self, terminalreporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("against the server")
        for why, number in self.explained.items():
            write(f"{number:5d} {why.kind}: {why.reason}")
        for name in sorted(name for name, outcome in self.outcomes.items() if outcome == "failed"):
            write(f"      failed: {name}")
        counts = Counter(self.outcomes.values())
        kinds = ("passed", "refused", "model", "skipped upstream", "failed")
        write(", ".join(f"{kind} {counts[kind]}" for kind in kinds) + f", of {len(self.outcomes)}")


def main(suite: str, directory: str, url: str, arguments: list[str]) -> int:
    if suite not in SUITES:
        raise SystemExit(f"suite={suite!r}: is none of {', '.join(SUITES)}")
    os.environ |= {"TEST_API_BASE_URL": url, "UPSTREAM_URL": url}
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as sdk:
        model = sdk.models.list().data[0].id
        # The first request of these dialects waits for vLLM's classes.
        sdk.with_options(timeout=180).responses.create(model=model, input="1+2", max_output_tokens=1)
    with tempfile.TemporaryDirectory() as made:
        root = Path(made).resolve()
        try:
            tests = SUITES[suite].copy(Path(directory), root, model)
        except ValueError as error:
            raise SystemExit(str(error)) from error
        os.chdir(root)
        counts = Counts(expectations(suite), "")
        settings = ["-c", "pytest.ini", "--rootdir", str(root), "-p", "no:cacheprovider", "-q", "--tb=short"]
        pytest.main([*settings, "--no-header", "-r", "N", "--timeout", "400", *tests, *arguments], plugins=[counts])
        os.chdir(_HERE)
    return int("failed" in counts.outcomes.values() or not counts.outcomes)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:4], sys.argv[4:]))
