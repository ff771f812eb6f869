"""Weights from trainer to generators on other hosts, beside one TCP stream of the same bytes over the same link.

    .venv/bin/python -m benchmarks.weight_sync [--layout fsdp2] [--rate-mbit 1000] [--syncs 4] [--dim 1024]

Makes two hosts with a network between them (`tests/network/bed.py`; needs root) and starts a worker on each, and
`weight_sync_driver` on host 0, which publishes and pulls after each optimizer step. In the first half of the syncs the
engines are idle, in the second half they sample. Counted from outside: the bytes on each host's interface, and the
largest resident memory of every rank, less what it was before the first sync. Prints a line of JSON per
sync, then a summary: medians without the first sync, whose memory is touched for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.weight_sync_driver import LAYOUTS
from tests.network.bed import Bed

_PORT = 26600


class Memory:
    """How much more memory than in the beginning each rank had at the most, as the kernel counts it."""

    def __init__(self, pids: dict[str, int]) -> None:
        """`pids`: by rank, its process."""
        self.pids, self.first = pids, {name: resident(pid, "VmRSS") for name, pid in pids.items()}

    def reset(self) -> None:
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the kernel's largest number begins anew

    def growth_mib(self) -> dict[str, float]:
        return {name: round((resident(pid, "VmHWM") - self.first[name]) / 2**20, 1) for name, pid in self.pids.items()}


def resident(pid: int, field: str) -> int:
    """`VmRSS`: a process's resident memory now; `VmHWM`: the most there has been. In bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def outer_pid(bed: Bed, address: str, inner: int) -> int:
    """The process of a host, by its id on this machine."""
    host = next(host for host in bed.hosts if host.address == address)
    inside = os.readlink(f"/proc/{host.pid}/ns/pid")
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.readlink(status.parent / "ns" / "pid") == inside:
                ids = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
                if int(ids[-1]) == inner:
                    return int(status.parent.name)
        except OSError:
            continue  # it has ended
    raise RuntimeError(f"{address}: no process {inner}")


def measure(bed: Bed, args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    log = open(f"{directory}/driver.log", "w")  # noqa: SIM115
    for host in bed.hosts:
        worker = [sys.executable, "-m", "torchtitan_rl.launch.worker", f"tcp://{host.address}:{_PORT}"]
        host.popen(worker, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    command = [sys.executable, "-m", "benchmarks.weight_sync_driver", "--directory", directory, "--layout", args.layout]
    command += ["--hosts", ",".join(f"tcp://{host.address}:{_PORT}" for host in bed.hosts)]
    for name in ("dim", "layers", "vocab_size", "syncs"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    driver = bed.hosts[0].popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=log, text=True)
    rows, memory, before, num_bytes = [], Memory({}), [], 0
    for line in driver.stdout:
        if not line.startswith("@"):
            continue
        message = json.loads(line[1:])
        event = message.pop("event")
        if event == "started":
            num_bytes = message["num_bytes"]
            memory = Memory({name: outer_pid(bed, *where) for name, where in message["pids"].items()})
        if event == "sync":
            before = [host.counters() for host in bed.hosts]
            memory.reset()
        if event == "synced":
            sent = [host.counters()[0] - then[0] for host, then in zip(bed.hosts, before, strict=True)]
            row = message | {"sent_mb": [round(n / 1e6, 1) for n in sent], "growth_mib": memory.growth_mib()}
            row |= {"model_mb": round(num_bytes / 1e6, 1)}
            rows.append({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
            print(json.dumps(rows[-1]), flush=True)
        driver.stdin.write("\n")
        driver.stdin.flush()
    if driver.wait(60):
        raise RuntimeError(f"the driver ended with {driver.returncode}\n{Path(log.name).read_text()[-3000:]}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="fsdp2", choices=LAYOUTS)
    parser.add_argument("--rate-mbit", type=float, default=0, help="of each host's link; 0: not limited")
    parser.add_argument("--delay-ms", type=float, default=0, help="one way between two hosts")
    parser.add_argument("--loss", type=float, default=0, help="of each packet, from 0 to 1")
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab-size", type=int, default=32768)
    args = parser.parse_args()
    if args.syncs < 4:
        parser.error(f"--syncs={args.syncs}: half are without sampling, and the first does not count; give 4 or more")
    if problem := Bed.missing():
        print(f"error: {problem}", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="weight-sync-", ignore_cleanup_errors=True) as directory,
        Bed(2, rate_mbit=args.rate_mbit, delay_ms=args.delay_ms, loss=args.loss) as bed,
    ):
        rows = measure(bed, args, directory)
        sent = max(max(row["sent_mb"]) for row in rows)
        streams = [bed.stream(0, 1, nbytes=int(max(sent, 1) * 1e6)) for _ in range(3)]
    stream_s = sent * 1e6 / median(streams)
    summary: dict[str, Any] = {"layout": args.layout, "rate_mbit": args.rate_mbit, "stream_s": round(stream_s, 3)}
    for name, chosen in (
        ("idle", [r for r in rows[1:] if not r["sampling"]]),
        ("sampling", [r for r in rows if r["sampling"]]),
    ):
        for part in ("publish_s", "pull_s", "load_s"):
            summary[f"{name}_{part}"] = round(median(row[part] for row in chosen), 3)
        summary[f"{name}_ratio"] = round(median(row["pull_s"] for row in chosen) / stream_s, 2)
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
