"""Pieces between hosts with a network: bytes on the link, memory, seconds beside one stream, and what fails."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network.bed import Bed
from tests.network.piece_exchange import shapes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(Bed.missing()), reason=Bed.missing() or "there is a bed"),
]

BUCKET = 64 * 2**20


class Exchange:
    """`ranks` publishers on host 0, and generator ranks on other hosts."""

    def __init__(self, bed: Bed, directory: Path, *, ranks: int, mebibytes: int):
        self.bed, self.directory, self.ranks, self.mebibytes = bed, directory, ranks, mebibytes
        self.num_bytes = 2 * sum(rows * (rest[0] if rest else 1) for rows, *rest in shapes(mebibytes).values())
        self.publishers = [
            self._start(0, "publish", directory, rank, ranks, mebibytes, stdout=subprocess.DEVNULL)
            for rank in range(ranks)
        ]
        end = time.monotonic() + 120
        while not all((directory / f"source-{rank}").exists() for rank in range(ranks)):
            assert time.monotonic() < end and all(process.poll() is None for process in self.publishers)
            time.sleep(0.1)

    def _start(self, host: int, *arguments, **options) -> subprocess.Popen:
        where = self.bed.hosts[host]
        return where.popen(
            [sys.executable, "-m", "tests.network.piece_exchange", *map(str, arguments)],
            env={"TORCHTITAN_RL_HOST_ADDRESS": where.address},
            **options,
        )

    def pull(self, host: int, rank: int, size: int) -> subprocess.Popen:
        arguments = self.directory, self.ranks, rank, size, self.mebibytes
        return self._start(host, "pull", *arguments, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=200)
    return json.loads(out.splitlines()[-1])


def test_a_pull_takes_as_long_as_one_stream_and_no_more_memory_than_its_part_and_a_bucket(tmp_path):
    with Bed(2, rate_mbit=1000) as bed:
        exchange = Exchange(bed, tmp_path, ranks=2, mebibytes=300)
        before = bed.hosts[1].counters()[1]
        told = said(exchange.pull(1, 0, 1))
        received = bed.hosts[1].counters()[1] - before
        stream_s = exchange.num_bytes / bed.stream(0, 1, nbytes=exchange.num_bytes)
        print(json.dumps(told | {"stream_s": stream_s, "received": received, "least": 2 * exchange.num_bytes}))
    assert told["right"] and told["bytes"] == pytest.approx(exchange.num_bytes, rel=1e-4)
    assert received <= 1.06 * 2 * exchange.num_bytes  # two pulls; headers are 4.6% of a full packet of 1,500 bytes
    assert max(told["seconds"]) <= 1.5 * stream_s
    assert told["growth"] <= exchange.num_bytes + BUCKET
    assert not bed.left()


def test_two_ranks_of_a_host_share_what_both_need(tmp_path):
    with Bed(2) as bed:
        exchange = Exchange(bed, tmp_path, ranks=2, mebibytes=150)
        before = bed.hosts[1].counters()[1]
        pulls = [exchange.pull(1, rank, 2) for rank in range(2)]
        told = [said(pull) for pull in pulls]
        received = bed.hosts[1].counters()[1] - before
    assert all(one["right"] and one["growth"] <= one["bytes"] * 2 + BUCKET for one in told)
    assert sum(one["bytes"] for one in told) > 1.1 * exchange.num_bytes  # the embedding is in both
    assert received <= 1.06 * 2 * exchange.num_bytes, "each rank pulls twice, and what both need comes once"


def test_a_link_that_is_down_for_five_seconds_heals(tmp_path):
    with Bed(2, rate_mbit=200) as bed:
        exchange = Exchange(bed, tmp_path, ranks=1, mebibytes=60)
        pull = exchange.pull(1, 0, 1)
        wait_for_bytes(bed, 2**20)
        bed.hosts[0].disconnect()
        time.sleep(5)
        bed.hosts[0].connect()
        told = said(pull)
    assert told["right"], told


@pytest.mark.parametrize("how", ["power", "process", "cable"])
def test_a_publisher_that_goes_is_named_with_its_version_within_the_limit(tmp_path, how):
    with Bed(2, rate_mbit=100) as bed:
        exchange = Exchange(bed, tmp_path, ranks=1, mebibytes=60)
        pull = exchange.pull(1, 0, 1)
        wait_for_bytes(bed, 2**20)
        began = time.monotonic()
        if how == "power":
            bed.hosts[0].kill()
        elif how == "cable":
            bed.hosts[0].disconnect()
        else:
            exchange.publishers[0].kill()
        told = said(pull)
    assert told["error"].startswith("policy_version=7: host host0 (10.77.0.1:"), told
    assert ("is gone" if how == "process" else "sent nothing for 10 s") in told["error"]
    took = told["at"] - began  # one clock for all processes of a machine
    print(json.dumps({"how": how, "took_s": took}))
    assert took < (5 if how == "process" else 25)


def wait_for_bytes(bed: Bed, num_bytes: int) -> None:
    first, end = bed.hosts[1].counters()[1], time.monotonic() + 60
    while bed.hosts[1].counters()[1] - first < num_bytes:
        assert time.monotonic() < end
        time.sleep(0.02)
