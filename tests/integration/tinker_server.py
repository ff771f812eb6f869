"""A server for Tinker's SDK in a process of its own."""

from contextlib import contextmanager

from tests.integration.conftest import ROOT
from tests.kit.server_process import printed, server_process


@contextmanager
def tinker_server(directory, *options, start_s=90):
    """Yields (url, process); the process's output is in DIRECTORY/server.log."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    arguments = ["-m", "torchtitan_rl.cli", "serve-tinker", str(ROOT / "configs" / "quickstart.py")]
    arguments += ["--output-dir", str(directory / "run"), *(() if "--port" in options else ("--port", "0"))]
    arguments += [*(() if "--max-restarts" in options else ("--max-restarts", "0")), *options]
    with server_process(arguments, log) as process:
        yield wait_for_url(process, log, start_s), process


def wait_for_url(process, log, start_s=90, number=1):
    """The URL that the server prints, at its start number `number`."""
    return printed(process, log, r"serving TINKER_BASE_URL=(\S+)", within_s=start_s, number=number)[1]
