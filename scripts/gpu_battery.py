"""Every check that wants a GPU, one after the other, each in a process of its own: `scripts/gpu_battery.sh --help`.

After each check `results.json` and `table.md` are written anew, so that it can be stopped at any time. Started again it
goes on: what has passed on this device is not run again. Each check's output is in `log/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from scripts.gpu_checks.catalogue import CHECKS, PARTS, Check
from scripts.gpu_checks.device import gpus

__all__ = ["Machine", "this_machine", "run", "dry_run", "main"]

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What checks may count on: the GPUs that a process here sees, their name, and which modules there are."""

    num_gpus: int
    device: str
    modules: frozenset[str]


def this_machine() -> Machine:
    modules = {module for part in PARTS.values() for module in part}
    installed = frozenset(module for module in modules if importlib.util.find_spec(module))
    num_gpus = 0
    if "torch" in installed:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = next((gpu["name"] for gpu in gpus()), "GPU") if num_gpus else "cpu"
    return Machine(num_gpus=num_gpus, device=device, modules=installed)


def left_out(check: Check, machine: Machine, tiny: bool) -> str:
    """Why a check does not run here; empty when it does."""
    if missing := [module for module in PARTS[check.needs] if module not in machine.modules]:
        return f"{', '.join(missing)}: not installed"
    if tiny and check.tiny or check.num_gpus <= machine.num_gpus and not tiny:
        return ""
    if machine.num_gpus == 0:
        return "no GPU"
    if tiny:
        return "no small form"
    return f"needs {check.num_gpus} GPUs, there is {machine.num_gpus}"


def execute(check: Check, out: Path, tiny: bool, running: set[subprocess.Popen] | None = None) -> dict:
    """Runs one check to its end or its time limit. A crash or a hang is an answer too. `running`: has the check's
    process as long as it runs; None: nobody asks."""
    running = set() if running is None else running
    result_file, log_file = (out / part / f"{check.name}.{part}" for part in ("json", "log"))
    for file in (result_file, log_file):
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
    command = [sys.executable, *check.command, "--result", str(result_file.absolute()), *["--tiny"] * tiny]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    if not check.measures:
        environment["TORCHTITAN_RL_MEMORY_CHECK"] = "0"  # others may be on the device
    if tiny:
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # see environment.default_environment
    start = time.monotonic()
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        try:
            code = process.wait(check.time_limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
            running.discard(process)
    outcome: dict[str, Any] = {"status": "running", "values": {}, "problems": []}
    if result_file.exists():
        outcome = json.loads(result_file.read_text())
    if code is None:
        outcome["status"] = "timed out"
        outcome["problems"].append(
            f"time_limit_s={check.time_limit_s}: it had not ended by then; see log/{check.name}.log"
        )
    elif outcome["status"] == "running" or outcome["status"] == "passed" and code:
        outcome["status"] = "crashed"
        lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
        last_line = f", which ends: {lines[-1][:200]}" if lines else ""
        outcome["problems"].append(f"exit status {code} without a result; see log/{check.name}.log{last_line}")
    return outcome | {"seconds": round(time.monotonic() - start, 1)}


def _end(process: subprocess.Popen) -> None:
    """Kills what is left of a check: its process group, the processes it has started included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(
    checks: list[Check],
    machine: Machine,
    out: Path,
    *,
    tiny: bool = False,
    again: bool = False,
    budget_s: float = float("inf"),
    together: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, dict]:
    """Runs checks in order and keeps the books. Returns every result in `out`, those of earlier starts included. A
    check that would begin more than `budget_s` after the first is left out; one that has begun has its own limit.
    `together`: checks that measure nothing all run at once, before the others."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    results, running, books = _read(out), set[subprocess.Popen](), threading.Lock()
    tiny = tiny or machine.num_gpus == 0

    def run_one(check: Check) -> None:
        here = {"device": machine.device, "tiny": tiny}
        before = results.get(check.name, {})
        if not again and before.get("status") == "passed" and {key: before[key] for key in here} == here:
            say(f"{check.name}: passed before ({before['seconds']} s); --again runs it anew")
            return
        reason = left_out(check, machine, tiny)
        if not reason and time.monotonic() - start > budget_s:
            if before:  # of an earlier start, which knows more
                say(f"{check.name}: budget; the earlier result stays")
                return
            reason = "budget"
        if reason:
            result = {"status": "skipped", "values": {}, "problems": [reason], "seconds": 0.0}
        else:
            say(f"{check.name}: {check.teaches} (at most {check.time_limit_s} s)")
            result = execute(check, out, tiny, running)
        with books:
            results[check.name] = here | result
            _write(results, out)
        say(f"{check.name}: {_verdict(result)}, {result['seconds']} s")

    at_once = [check for check in checks if together and not check.measures]
    with ThreadPoolExecutor(max(1, len(at_once))) as pool:
        try:
            list(pool.map(run_one, at_once))
        except BaseException:  # Ctrl-C: the pool waits for its threads, and these for their checks
            for process in list(running):
                _end(process)
            raise
    for check in checks:
        if check not in at_once:
            run_one(check)
    return results


def _verdict(result: dict) -> str:
    return "; ".join([result["status"], *result["problems"][:3]])


def _read(out: Path) -> dict[str, dict]:
    file = out / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _write(results: dict[str, dict], out: Path) -> None:
    for name, text in (("results.json", json.dumps(results, indent=1)), ("table.md", table(results))):
        new = out / f"{name}.new"
        new.write_text(text + "\n")
        new.rename(out / name)


def table(results: dict[str, dict]) -> str:
    """Markdown: a line for each check, then what each of them found."""
    lines = ["| check | device | result | seconds |", "|---|---|---|---|"]
    for name, result in results.items():
        device = result["device"] + (", small shapes" if result["tiny"] else "")
        lines.append(f"| {name} | {device} | {_verdict(result).replace('|', '/')} | {result['seconds']} |")
    for name, result in results.items():
        if result["values"] or len(result["problems"]) > 3:
            lines += ["", f"## {name}", ""]
            lines += [f"- problem: {problem}" for problem in result["problems"]]
            for key, value in result["values"].items():
                if isinstance(value, list) and value and isinstance(value[0], dict):  # rows with the same columns
                    columns = list(value[0])
                    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
                    lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in value]
                    lines.append("")
                else:
                    lines.append(f"- {key}: {_plain(value)}")
    return "\n".join(lines)


def _plain(value) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return "; ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def dry_run(checks: list[Check], machine: Machine, say: Callable[[str], None] = print) -> None:
    """Lists checks in order and validates the configs of those that make a run; starts nothing. Without torchtitan,
    which configs are made of, only lists. Raises ValueError for a config that a run would refuse."""
    elapsed = 0
    for number, check in enumerate(checks, start=1):
        elapsed += check.time_limit_s
        notes = [f"needs {check.needs}", f"{check.num_gpus} GPUs" if check.num_gpus != 1 else "1 GPU"]
        if check.config is not None and "torchtitan" in machine.modules:
            notes.append(_validated(check.config))
        if reason := left_out(check, machine, machine.num_gpus == 0):
            notes.append(f"left out here: {reason}")
        say(
            f"{number:>2}. {check.name:<23} {check.time_limit_s:>3} s, {elapsed / 60:4.1f} min in all: "
            f"{check.teaches} ({'; '.join(notes)})"
        )


def _validated(config: Callable[[], Any]) -> str:
    """What the dry run says of a config that is valid, or that parts of the stack do not suffice to make or to read."""
    try:
        _validate(config())
    except ImportError as error:
        return f"config not validated: {error.name or error} does not import"
    return "config valid"


def _validate(config) -> None:
    from torchtitan_rl.launch.inventory import check_fits, local_host
    from torchtitan_rl.validation.run import validate

    validate(config)
    check_fits(config, [dataclasses.replace(local_host(), devices=[])])  # GPUs differ from machine to machine


def _chosen(names: list[str]) -> list[Check]:
    """The checks of these names, in their order; all of them without names. Raises ValueError for an unknown one."""
    known = {check.name: check for check in CHECKS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise ValueError(f"--only={name}: there is no such check; {hint}")
    return [check for check in CHECKS if not names or check.name in names]


def main(argv: list[str] | None = None) -> int:
    """The command. Returns 0 when nothing failed, 1 when something did, 2 for a mistake, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_battery.sh", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this check; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="list checks, validate their configs, start nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-battery", metavar="DIR", help="for results")
    parser.add_argument("--again", action="store_true", help="run what has passed before, too")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), metavar="S", help="seconds after which no further check begins"
    )
    parser.add_argument("--together", action="store_true", help="run what measures nothing at once, before the rest")
    parser.add_argument("--tiny", action="store_true", help="small shapes only, as on a machine without a GPU")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the check that runs has to end before this process does
        signal.signal(number, _exit)
    try:
        checks = _chosen(args.only)
        machine = this_machine()
        if args.dry_run:
            dry_run(checks, machine)
            return 0
        again = args.again or bool(args.only)
        results = run(
            checks,
            machine,
            args.out.absolute(),
            tiny=args.tiny,
            again=again,
            budget_s=args.budget_s,
            together=args.together,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    print(f"\n{table(results)}\n\n{args.out / 'results.json'}\n{args.out / 'table.md'}")
    return int(any(results[check.name]["status"] not in ("passed", "skipped") for check in checks))


def _exit(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
