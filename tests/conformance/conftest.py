"""Options, fixtures and the score by area: see README.md."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from kit import CALM, Kit, moved, weighted
from raw import Raw

AREAS = ("losses", "optimizer", "order", "duplicates", "errors", "checkpoints", "sampling")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--base-url", help="address of the server, such as http://127.0.0.1:8000; without it only the "
                    "kit's own arithmetic is checked")  # fmt: skip
    group.addoption("--base-model", help="base model to train; default: the first of get_server_capabilities")
    group.addoption("--api-key", help="API key (default tml-conformance); given: a wrong key has to be refused")
    group.addoption("--weights", type=Path, metavar="DIR", help="Hugging Face directory of the base model")
    group.addoption("--tokens", type=int, metavar="N", help="vocabulary size; default: that of --weights, or 64 ids")
    group.addoption("--raw", nargs="?", const="yes", default="yes", choices=("yes", "no", "only"),
                    help="tests that post bytes without the SDK's clients")  # fmt: skip
    group.addoption("--patience", type=float, default=120.0, help="seconds after which no answer is a failure")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "raw: posts bytes without the SDK's clients")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    which = config.getoption("--raw")
    for item in items:
        area = item.path.stem.split("_")[1]
        if area not in AREAS:
            continue
        is_raw = item.get_closest_marker("raw") is not None
        if config.getoption("--base-url") is None:
            item.add_marker(pytest.mark.skip(reason="needs --base-url"))
        elif (which == "no" and is_raw) or (which == "only" and not is_raw):
            item.add_marker(pytest.mark.skip(reason=f"--raw {which}"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The score: passed of those that ran, by area. A test that fails, or whose fixtures fail, counts once."""
    outcomes: dict[str, str] = {}
    for outcome in ("skipped", "passed", "failed", "error"):  # the later says more
        for report in terminalreporter.getreports(outcome):
            outcomes[report.nodeid] = outcome
    score = Counter((Path(node.split("::")[0]).stem.split("_")[1], outcome) for node, outcome in outcomes.items())
    terminalreporter.section("conformance")
    for area in AREAS:
        passed, skipped = score[area, "passed"], score[area, "skipped"]
        ran = passed + score[area, "failed"] + score[area, "error"]
        if ran + skipped:
            left_out = f" ({skipped} not run)" if skipped else ""
            terminalreporter.write_line(f"{area} {passed}/{ran}{left_out}")


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Kit:
    option = request.config.getoption
    url, key = option("--base-url").rstrip("/"), option("--api-key") or "tml-conformance"
    patience, weights, tokens = option("--patience"), option("--weights"), option("--tokens")
    model = option("--base-model")
    if model is None:
        offered = tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result(timeout=patience)
        model = offered.supported_models[0].model_name
    known = tokens is not None or weights is not None
    if tokens is None:
        tokens = json.loads((weights / "config.json").read_text())["vocab_size"] if weights else 64
    return Kit(url, key, model, tokens, known, patience, weights, keyed=option("--api-key") is not None)


@pytest.fixture
def service(kit: Kit) -> Iterator[tinker.ServiceClient]:
    """A session of the test's own."""
    with kit.session() as client:
        yield client


@pytest.fixture(scope="module")
def keeper(kit: Kit) -> Iterator[tinker.ServiceClient]:
    """The session of the models that several tests of a module use."""
    with kit.session() as client:
        yield client


@pytest.fixture(scope="session")
def state(kit: Kit) -> str:
    """Path of a saved model that has left its first state: with LoRA both factors then have gradients."""
    with kit.session() as service:
        client = kit.fresh(service)
        start = kit.probe(client)
        for count in range(6):
            kit.step(client, [weighted(kit.sequence(24, count))], lr=2e-2, eps=1e-6)
        moved(kit.probe(client), start)
        return kit.wait(client.save_state("conformance-start")).path


@pytest.fixture(scope="session")
def stride(kit: Kit, state: str) -> float:
    """A factor a such that a step of -a * gradient moves the saved model's log-probabilities by a few hundredths."""
    with kit.session() as service:
        client, size = kit.load(service, state), 1e-8
        before = kit.probe(client)
        for _ in range(20):
            kit.step(client, kit.probes(), lr=size * CALM, eps=CALM)
            after = kit.probe(client)
            shift = np.max(np.abs(after - before))
            if shift >= 0.02:
                return size
            before, size = after, size * min(8.0, 0.04 / max(shift, 1e-9))
    raise AssertionError(f"stride={size:g}: steps up to this factor of the gradient do not move the model")


@pytest.fixture
def raw(kit: Kit) -> Iterator[Raw]:
    with Raw(kit) as client:
        yield client
