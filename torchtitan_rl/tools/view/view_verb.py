"""The verb `view`: serves the page over some runs on this machine until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_rl.serve.listening import Listening
    from torchtitan_rl.tools.view.access import ReadOnly
    from torchtitan_rl.tools.view.runs import ShownRun

__all__ = ["add_arguments", "run"]

_HOST = "127.0.0.1"
_TRIED = 20
_LAST_PORT = 65535
_PAGES_AT_ONCE = 4
"""Threads that make pages. Each keeps memory of its own in the allocators of the C library, Arrow and DuckDB: with the
usual 40 the process grew for many rounds of requests. 64 clients at once wait a fifth longer for it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, which need not be there yet")
    parser.add_argument("--port", type=int, default=8765, help="the next one where it is in use")
    parser.add_argument(
        "--allow-host",
        dest="allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine, as a proxy sends it in Host; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Serves until interrupted. A run may begin later: its directory need not be there yet. Raises ValueError for a
    path that is no directory, for a number that is no port, when no port is free, and where the package that the page
    needs is not installed."""
    if not 0 <= args.port <= _LAST_PORT:
        raise ValueError(f"--port={args.port}: must be from 0, which takes a free one, to {_LAST_PORT}")
    try:
        from torchtitan_rl.tools.rollouts import Query
        from torchtitan_rl.tools.view.application import application
        from torchtitan_rl.tools.view.runs import open_runs
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in (
            "fastapi",
            "starlette",
            "uvicorn",
            "httptools",
            "duckdb",
            "jinja2",
            "markupsafe",
        ):
            raise
        raise ValueError(f"view: needs the package {error.name}; pip install it, or run scripts/setup.sh") from error
    runs = open_runs(args.runs)
    app = application(runs, args.allow_host)
    runs[0].rollouts.find(Query())  # reads what lists need, so that the first list is quick
    asyncio.run(_serve(app, args.port, runs))
    return 0


async def _serve(app: ReadOnly, port: int, runs: list[ShownRun]) -> None:
    from anyio import to_thread

    to_thread.current_default_thread_limiter().total_tokens = _PAGES_AT_ONCE
    listening = await _listening(app, port)
    names = [shown.name for shown in runs]
    taken = f" (port {port} is in use)" if port and listening.port != port else ""
    print(f"{', '.join(names)}: {listening.url}{taken}; Ctrl-C ends it", flush=True)
    for shown in runs:
        if not (path := shown.run.path).exists():
            near = difflib.get_close_matches(path.name, _directories(path.parent), 1)
            hint = f" (did you mean {path.parent / near[0]}?)" if near else ""
            print(f"{path}: is not there yet{hint}; the page shows the run when it begins", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await listening.close()


def _directories(parent: Path) -> list[str]:
    return [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []


async def _listening(app: ReadOnly, port: int) -> Listening:
    """A server on the first free port from `port` on. Raises ValueError when none of some is free."""
    from torchtitan_rl.serve.listening import Listening

    tried = range(port, min(port + _TRIED, _LAST_PORT + 1) if port else 1)
    for number in tried:
        try:
            return await Listening(app, _HOST, number).__aenter__()
        except ValueError as error:
            last = error
    raise ValueError(f"--port={port}: none from {tried[0]} to {tried[-1]} is free ({last}); give another")
