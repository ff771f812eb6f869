"""Which files one process runs where several share them (`--dist loadfile`, as scripts/test.sh asks for), no time
limit for an example of hypothesis, and processes that start as forks.

OpenMP reads its wait policy when torch is loaded, so it is set before any import. Processes of tests share the cores
with each other: their waiting threads sleep, where those of a run spin for a moment."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

import torchtitan_rl  # noqa: F401
from tests.kit.forks.server import SERVERS, await_imports, forks, in_use, take_back, variables_of

settings.register_profile("any machine", deadline=None)  # 200 ms by default, which a busy machine takes now and then
settings.load_profile("any machine")

SHARERS = {
    "short_run": ("test_backends_agree", "test_command_line", "test_diagnose", "test_examples", "test_timeline"),
    "controller": ("test_ahead", "test_batches", "test_stack", "test_stopping"),
}
"""A fixture that lasts for the session and takes half a minute to start: the files of tests/integration that use it.
One process runs them all, so that it is started once. A file that is missing here starts one of its own."""


LONG = (
    *("test_joined_hosts", "test_bench", "test_resume", "test_doors", "test_states", "test_hosts", "test_sockets"),
    *("test_adapters_side_by_side", "test_sandboxes_on_hosts"),
)
"""The files that take longest, a minute and more on two cores: they begin first, so that no process waits for one of
them at the end."""


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        return LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)

    items.sort(key=place)  # stable: the others stay in their order


def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") != "loadfile":
        return None  # the usual one
    from xdist.scheduler import LoadFileScheduling

    fixtures = {f"tests/integration/{file}.py": fixture for fixture, files in SHARERS.items() for file in files}

    class SharerScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return fixtures.get(Path(file).as_posix(), file)

    return SharerScheduling(config, log)


AWAITED = ("trainer", "generator")
"""What is imported when the first test wants forks, before it begins."""
SHARED = f"{SERVERS}_SHARED"
"""The environment variable with the directory of a server that all processes of the tests share."""
CLOSED_AT_THE_END = pytest.StashKey[ExitStack]()


def pytest_configure(config):
    """Where several processes share the tests, they share a server of forks: imports are made once."""
    config.stash[CLOSED_AT_THE_END] = ExitStack()
    is_one_of_them = hasattr(config, "workerinput")
    if getattr(config.option, "numprocesses", None) and not is_one_of_them and os.environ.get(SERVERS) != "off":
        os.environ[SHARED] = config.stash[CLOSED_AT_THE_END].enter_context(forks())[SERVERS]


def pytest_unconfigure(config):
    config.stash[CLOSED_AT_THE_END].close()


def pytest_runtest_setup(item):
    """What the tests before have left in the environment does not keep a file's later processes from being forks."""
    if (directory := os.environ.get(SERVERS, "off")) != "off":
        take_back(directory)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[dict[str, str]]:
    """For `in_use`: the environment variables of a server of forks (`tests.kit.forks.server`). None with
    TORCHTITAN_RL_TEST_FORKS=off: then every process starts by itself."""
    if os.environ.get(SERVERS) == "off":
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(SERVERS)
            yield {}
    elif directory := os.environ.get(SHARED):
        for kind in AWAITED:
            await_imports(f"{directory}/{kind}")
        yield variables_of(directory)
    else:
        with forks(AWAITED) as variables:
            yield variables


@pytest.fixture(scope="module")
def forked(fork_server) -> Iterator[None]:
    """Lets the processes that a file starts be forks."""
    with in_use(fork_server):
        yield
