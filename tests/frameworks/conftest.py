"""The server that the frameworks meet, and a table of what worked at the end."""

import os
from collections import defaultdict

import pytest

# Frameworks report to their makers, or look for prices and keys; nothing here may leave the machine.
os.environ |= {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def pytest_addoption(parser):
    parser.addoption("--base-url", required=True, help="of `serve`, with /v1, on a checkpoint of calculator_tools")


@pytest.fixture(scope="session")
def url(request):
    return request.config.getoption("--base-url")


@pytest.fixture(scope="session")
def root(url):
    """What Anthropic's clients take: they add /v1 themselves."""
    return url.removesuffix("/v1")


_outcomes = defaultdict(dict)


def pytest_runtest_logreport(report):
    if (report.when == "call" and not report.skipped) or report.failed:
        framework = report.nodeid.rpartition("/")[2].partition(".py")[0].removeprefix("test_")
        _outcomes[framework][report.nodeid] = report.passed


def pytest_terminal_summary(terminalreporter):
    worked = {name: (sum(cases.values()), len(cases)) for name, cases in _outcomes.items()}
    terminalreporter.section("frameworks")
    for name, (right, number) in worked.items():
        terminalreporter.write_line(f"{name} {right}/{number}")
    right, number = (sum(counts) for counts in zip(*worked.values())) if worked else (0, 0)
    terminalreporter.write_line(f"all {right}/{number}")
