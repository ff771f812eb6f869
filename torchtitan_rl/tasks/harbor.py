"""A task directory in Harbor's format, played without containers by a command: what runs, not where it is isolated.

    external([sys.executable, harbor.__file__, "path/of/task", "my-agent"], ...)

`python harbor.py TASK AGENT...` copies `environment/` into the working directory, gives the agent `instruction.md` as
its last argument, runs `tests/test.sh`, and posts its reward to the session: none that the agent has posted counts.
Standard library only: it starts once per attempt.
docs/environments.md says which parts of the format count. https://www.harborframework.com
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

__all__ = ["main"]

_POST_S = 60.0


def main(task: str, *agent: str) -> None:
    """Plays a task in the working directory. Exits with a message for a task or an agent that cannot run."""
    directory = Path(task).resolve()
    try:
        settings = tomllib.loads((directory / "task.toml").read_text())
        instruction = (directory / "instruction.md").read_text().strip()
    except (OSError, tomllib.TOMLDecodeError) as error:
        sys.exit(f"harbor: task={task!r}: is not a task in Harbor's format ({error}); give its directory")
    if not (directory / "tests" / "test.sh").is_file():
        sys.exit(f"harbor: task={task!r}: has no tests/test.sh, which judges the agent; write it")
    if not agent:
        sys.exit("harbor: agent: is missing; give its command after the task's directory")
    for part in (directory / "environment").glob("*"):
        if part.name != "Dockerfile":
            (shutil.copytree if part.is_dir() else shutil.copy2)(part, part.name)
    logs = Path(os.environ.get("TMPDIR", ".")).resolve() / "harbor-logs"
    (logs / "verifier").mkdir(parents=True)
    status = _run([*agent, instruction], settings.get("agent", {}), {})
    # After the agent, who could have written rewards or tests of its own.
    tests = logs.parent / "harbor-tests"
    for place in (logs / "verifier", tests):
        shutil.rmtree(place, ignore_errors=True)
    (logs / "verifier").mkdir(parents=True)
    shutil.copytree(directory / "tests", tests)
    places = {"HARBOR_LOGS": str(logs), "HARBOR_TESTS": str(tests)}
    _run(["bash", str(tests / "test.sh")], settings.get("verifier", {}), places)
    try:
        _post(_reward(logs / "verifier"))
    except SystemExit:
        _post({"reward": 0.0})  # at a limit of its session what was posted last counts, although this fails
        raise
    if status:  # its tests have judged it: at a limit of its session their reward is the reward so far
        sys.exit(f"harbor: {agent[0]!r} ended with status {status}")


def _run(command: list[str], settings: dict, places: dict[str, str]) -> int:
    """Runs the agent or, with `places`, the tests. Every process that they started has ended when this returns. Returns
    the exit status, 0 for one that was late."""
    from process_tree import adopt_orphans, kill_descendants  # beside this file, which runs as a script

    variables = {name: str(value) for name, value in settings.get("env", {}).items()}
    adopt_orphans()
    try:
        process = subprocess.Popen(command, env=os.environ | variables | places, process_group=0)
    except OSError as error:
        sys.exit(f"harbor: {command[0]!r} cannot be started ({error}); mend the command")
    try:
        status = process.wait(settings.get("timeout_sec"))
    except subprocess.TimeoutExpired:
        status = 0  # an agent that is late has done what it has done, and tests that are late have no reward
    finally:
        process.kill()
        process.wait()
        # What it has begun, in sessions of their own too: nothing writes a reward beside the tests.
        kill_descendants(process.pid)
    return status


def _post(reward: dict[str, float]) -> None:
    """Posts a reward and its parts to the session: the agent has the key too, and what is posted last counts."""
    body = {"reward": reward["reward"], "parts": {name: value for name, value in reward.items() if name != "reward"}}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['SESSION_URL']}/reward", json.dumps(body).encode(), headers)
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_POST_S).close()
    except OSError as error:
        sys.exit(f"harbor: the reward was not taken ({error}); mend what tests/test.sh writes")


def _reward(verifier: Path) -> dict[str, float]:
    """`reward.json` (numbers by name; `reward`, else their mean, is the reward), or the number of `reward.txt`."""
    try:
        if (verifier / "reward.json").exists():
            parts = {name: float(value) for name, value in json.loads((verifier / "reward.json").read_text()).items()}
            if not parts:
                raise ValueError("reward.json has no numbers")
            return {"reward": parts.get("reward", sum(parts.values()) / len(parts))} | parts
        return {"reward": float((verifier / "reward.txt").read_text())}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        sys.exit(f"harbor: tests/test.sh left no reward ({error}); it must write {verifier}/reward.txt or reward.json")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: harbor.py TASK AGENT...")
    main(*sys.argv[1:])
