"""Runs of the quickstart on hosts in network namespaces, on this machine. Needs root, ip and tc.

    .venv/bin/python -m scripts.network_bed stream [--rate-mbit 100] [--delay-ms 50] [--loss 0.01]
    .venv/bin/python -m scripts.network_bed quickstart [--layout over-both] [--door torchrun] [--rate-mbit 0]
    .venv/bin/python -m scripts.network_bed fault NAME [--times 1]
    .venv/bin/python -m scripts.network_bed faults [--times 10] [--only NAME,NAME]

`stream` measures one TCP stream, `quickstart` makes the whole run of configs/quickstart.py in a layout, `fault` does
one harm to a run of 20 steps, `faults` all of them in turn. Each line of output is JSON. Exit status 1 where a promise
was broken or something was left. The runs stay in --output-dir.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.network import faults
from tests.network.bed import Bed
from tests.network.faults import FAULTS
from tests.network.runs import DOORS, LAYOUTS, Run


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if problem := Bed.missing():
        print(f"error: {problem}", file=sys.stderr)
        return 1
    output = Path(args.output_dir or tempfile.mkdtemp(prefix="network-bed-")).resolve()
    link = {"rate_mbit": args.rate_mbit, "delay_ms": args.delay_ms, "loss": args.loss, "mtu": args.mtu}
    link["own_cores"] = not args.all_cores
    if args.what == "stream":
        return _stream(link)
    if args.what == "quickstart":
        return _quickstart(args.layout, args.door, link, output)
    names = [args.name] if args.what == "fault" else (args.only.split(",") if args.only else list(FAULTS))
    return _faults(names, args.times, output, args.all_cores)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="network_bed", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="what", required=True)
    for verb_name in ("stream", "quickstart", "fault", "faults"):
        verb = verbs.add_parser(verb_name)
        verb.add_argument("--output-dir", default="", help="where the runs stay; default: a new temporary directory")
        verb.add_argument("--rate-mbit", type=float, default=0, help="of each host's link; 0: not limited")
        verb.add_argument("--delay-ms", type=float, default=0, help="one way between two hosts")
        verb.add_argument("--loss", type=float, default=0, help="of each packet, from 0 to 1")
        verb.add_argument("--mtu", type=int, default=0, help="bytes of a packet; 0: 1500, and 9000 with loss")
        verb.add_argument("--all-cores", action="store_true", help="every host may use all cores, not a share of them")
        verb.add_argument("--times", type=int, default=1, help="how often")
        verb.add_argument("--only", default="", help="faults by name, with commas between")
        if verb_name == "quickstart":
            verb.add_argument("--layout", default="over-both", choices=LAYOUTS)
            verb.add_argument("--door", default="torchrun", choices=DOORS)
        if verb_name == "fault":
            verb.add_argument("name", choices=FAULTS)
    return parser


def _stream(link: dict) -> int:
    with Bed(2, **link) as bed:
        num_bytes = 1_000_000
        while (speed := bed.stream(0, 1, nbytes=num_bytes)) * 3 > num_bytes:  # three seconds at least
            num_bytes *= 4
    _say(what="stream", **link, mtu_used=bed.mtu, bytes=num_bytes, bytes_per_s=round(speed))
    return 0


def _quickstart(layout: str, door: str, link: dict, output: Path) -> int:
    num_hosts, arguments = LAYOUTS[layout]
    began = time.monotonic()
    with Bed(num_hosts, **link) as bed:
        run = Run(bed, output / f"quickstart-{layout}-{door}", arguments, door=door)
        statuses = run.ended(1800)
        traffic = [host.counters() for host in bed.hosts]
        run.nothing_left()
    lines = run.lines()
    accuracy = [line.split("│")[2].strip() for line in run.text().splitlines() if "(test, looked at once)" in line]
    steps = sorted(line["time/step_s"] for line in lines)
    _say(
        what="quickstart",
        layout=layout,
        door=door,
        hosts=num_hosts,
        **link,
        statuses=statuses,
        test_accuracy=accuracy,
        steps=len(steps),
        median_step_s=steps[len(steps) // 2] if steps else None,
        seconds=round(time.monotonic() - began),
        sent_and_received=traffic,
        left=bed.left(),
    )
    return int(set(statuses.values()) != {0} or bool(bed.left()))


def _faults(names: list[str], times: int, output: Path, all_cores: bool) -> int:
    broken = 0
    faults.OPTIONS["own_cores"] = not all_cores
    for number in range(times):
        for name in names:
            began = time.monotonic()
            try:
                figures = FAULTS[name](output / f"{name}-{number}")
            except (AssertionError, RuntimeError, OSError) as error:
                broken += 1
                traceback.print_exc()
                figures = {"broken": str(error).splitlines()[0][:300]}
            _say(fault=name, number=number + 1, of=times, seconds=round(time.monotonic() - began), **figures)
    return int(broken > 0)


def _say(**record: object) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
