"""Hosts on one machine with a real network between them: each a process tree in namespaces of its own, joined by a
bridge.

    with Bed(2, rate_mbit=100) as bed:
        process = bed.hosts[0].popen(["python", "-m", "torchtitan_rl.launch.worker", "tcp://10.77.0.1:26600"])

A host has its own network, process ids, host name, /etc/hosts, /dev/shm, /var/tmp (its TMPDIR) and a share of the
cores; all other files are shared, as on a cluster's file system. No namespace has a name and no device outlives its
namespace: when the process that made the bed dies, of whatever, the kernel removes everything. Needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.network import namespaces
from tests.network.namespaces import in_network

__all__ = ["Bed", "Host"]

ROOT = Path(__file__).parents[2]
_HOST = ["--net", "--pid", "--uts", "--ipc", "--mount", "--fork", "--kill-child=KILL", "--mount-proc"]
_MTU, _JUMBO_MTU = 1500, 9000
_END_S = 10.0


class Host:
    """One host of a bed. `cores` are its share of this machine's."""

    def __init__(self, bed: Bed, index: int, cores: set[int]):
        self.bed, self.index, self.cores = bed, index, cores
        self.name, self.address = f"host{index}", f"10.77.0.{index + 1}"
        self.starts = 0
        """How often it was started; its port of the switch is named after that."""
        self._holder: subprocess.Popen | None = None
        self._relay: subprocess.Popen | None = None
        self._processes: list[subprocess.Popen] = []

    @property
    def port(self) -> str:
        """The device of the bed's switch that this host's cable ends in."""
        return f"port{self.index}-{self.starts}"

    @property
    def pid(self) -> int:
        """The process that is PID 1 of the host, by its id on this machine. Raises RuntimeError while it is off."""
        if self._holder is None:
            raise RuntimeError(f"{self.name}: is off; start() it first")
        return self._pid

    def start(self) -> None:
        """Switches the host on, empty, with its cable plugged in."""
        if self._holder is not None:
            raise RuntimeError(f"{self.name}: is on already")
        self.starts += 1
        names = "\\n".join(f"{host.address} {host.name}" for host in self.bed.hosts)
        self._holder = namespaces.hold(
            _HOST,
            f"echo {self.name} > /proc/sys/kernel/hostname\n"
            "mount -t tmpfs tmpfs /dev/shm\nmount -t tmpfs tmpfs /var/tmp\n"
            f"printf '127.0.0.1 localhost\\n{names}\\n' > /var/tmp/.hosts\nmount --bind /var/tmp/.hosts /etc/hosts\n"
            # A congestion control that backs off at a loss, whatever this machine's own is. A kernel may keep cubic,
            # which most hosts use, from namespaces.
            "cd /proc/sys/net/ipv4\necho cubic > tcp_congestion_control 2>/dev/null || "
            "echo reno > tcp_congestion_control",
        )
        self._pid = namespaces.holder_pid(self._holder)
        self.namespaces = namespaces.identities(self._pid)
        self._plug_in()

    def _plug_in(self) -> None:
        bed, switch = self.bed, self.bed.switch.pid
        if bed.relayed:
            numbers = (bed.delay_ms, bed.jitter_ms, bed.loss, 1000 * self.index + self.starts)
            self._relay = _relay(self.pid, switch, self.port, *numbers)
        else:
            in_network(self.pid, f"link add name eth0 type veth peer name {self.port} netns {switch}")
        in_network(
            self.pid,
            "link set lo up",
            f"link set eth0 mtu {bed.mtu} address 02:00:0a:4d:00:{self.index + 1:02x} addrgenmode none",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
        )
        in_network(
            switch, f"link set {self.port} mtu {bed.mtu} addrgenmode none master switch", f"link set {self.port} up"
        )
        in_network(self.pid, *bed.shaping("eth0", leaving=True), tool="tc")
        in_network(switch, *bed.shaping(self.port, leaving=False), tool="tc")

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] = {}, cwd: Path | str = ROOT, **options
    ) -> subprocess.Popen:
        """Starts a command in the host. `env` is added to this process's environment; `options` are Popen's."""
        env = {"TMPDIR": "/var/tmp", **env}
        process = namespaces.popen(self.pid, command, env=env, cwd=str(cwd), cores=self.cores, **options)
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], timeout_s: float = 30.0, **options) -> str:
        """What a command prints. Raises RuntimeError with its errors when it ends with another status than 0."""
        process = self.popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        out, errors = process.communicate(timeout=timeout_s)
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)} ended with {process.returncode}: {errors.strip()}")
        return out

    def kill(self) -> None:
        """A power cut: the cable goes silent, then every process of the host is gone, and with them all it had."""
        if self._holder is None:
            return
        in_network(self.bed.switch.pid, f"link set {self.port} down")  # else the dying sockets would say goodbye
        os.kill(self._pid, signal.SIGKILL)
        for process in (*self._processes, self._holder):  # PID 1 ends after all others are waited for
            process.wait(_END_S)
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(_END_S)
        for process in filter(None, (self._holder, self._relay)):
            _close(process)
        self._holder = self._relay = None
        self._processes.clear()

    def disconnect(self) -> None:
        """Takes the host's link down: nothing arrives, and nobody is told."""
        in_network(self.bed.switch.pid, f"link set {self.port} down")

    def connect(self) -> None:
        """Takes the host's link up again."""
        in_network(self.bed.switch.pid, f"link set {self.port} up")

    def counters(self) -> tuple[int, int]:
        """Bytes that the host's interface has sent and received since the host was started, headers included."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[8]), int(numbers.split()[0])
        raise RuntimeError(f"{self.name}: has no eth0")

    def processes(self) -> list[str]:
        """The processes of the host but the one that holds it, each with its command line."""
        inside = namespaces.users_of({os.readlink(f"/proc/{self.pid}/ns/pid")})
        return [line for line in inside if not line.startswith(f"{self.pid} ")]


class Bed:
    """Hosts that are joined by a bridge.

    `rate_mbit` limits each host's link in both directions, in Mbit/s; `delay_ms` (one way between two hosts, so a round
    trip has twice that), `jitter_ms` and `loss` (of each packet, once, from 0 to 1) act on what leaves a host. 0: not
    limited. `mtu` is the largest packet in bytes; 0 means 1500, and 9000 with loss: a TCP stream that backs off at a
    loss carries about 1.22 MTU / (round trip x sqrt(loss)) bytes per second, which at 100 ms and 1% is 180 KB/s with
    1500 and 1.1 MB/s with 9000, the jumbo frames of a cluster's network. `own_cores`: whether the
    cores are dealt out to the hosts; else every host may use all of them.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        rate_mbit: float = 0,
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        loss: float = 0.0,
        mtu: int = 0,
        own_cores: bool = True,
    ):
        """Raises ValueError for numbers out of range, RuntimeError where no bed can be made (`missing`)."""
        if not 1 <= num_hosts <= 250:
            raise ValueError(f"num_hosts={num_hosts}: a bed has 1 to 250 hosts")
        if rate_mbit < 0 or jitter_ms < 0 or delay_ms < jitter_ms or not 0 <= loss < 1:
            raise ValueError(
                f"rate_mbit={rate_mbit:g}, delay_ms={delay_ms:g}, jitter_ms={jitter_ms:g}, loss={loss:g}: none may be "
                "negative, the loss has to be below 1 and the jitter at most the delay"
            )
        if problem := self.missing():
            raise RuntimeError(problem)
        self.rate_mbit, self.delay_ms, self.jitter_ms, self.loss = rate_mbit, delay_ms, jitter_ms, loss
        self.mtu = mtu or (_JUMBO_MTU if loss else _MTU)
        self.relayed = bool(delay_ms or loss) and not namespaces.has_netem()
        """Whether relay processes delay and lose packets: this kernel has no netem."""
        if self.relayed and not Path("/dev/net/tun").exists():
            raise RuntimeError("/dev/net/tun: is not there, and without netem in the kernel delay and loss need it")
        cores = shares(num_hosts) if own_cores else [os.sched_getaffinity(0)] * num_hosts
        self.hosts = [Host(self, index, share) for index, share in enumerate(cores)]
        self._namespaces: set[str] = set()

    @staticmethod
    def missing() -> str:
        """Why no bed can be made on this machine, in one sentence; "" when one can."""
        return namespaces.missing()

    def __enter__(self) -> Bed:
        script = (
            "ip link add name switch type bridge stp_state 0 forward_delay 0\nip link set switch addrgenmode none up"
        )
        self.switch = namespaces.hold(["--net"], script)
        self._namespaces = {os.readlink(f"/proc/{self.switch.pid}/ns/net")}
        try:
            for host in self.hosts:
                host.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error) -> None:
        for host in self.hosts:
            if host.starts:
                self._namespaces |= host.namespaces
            host.kill()
        self.switch.kill()
        self.switch.wait(_END_S)
        _close(self.switch)

    def left(self) -> list[str]:
        """After the end: processes that are still in a namespace of the bed, each with its command line. No such
        process: the kernel has removed namespaces, devices and shared memory."""
        return namespaces.users_of(self._namespaces - namespaces.identities(os.getpid()))

    def shaping(self, device: str, *, leaving: bool) -> list[str]:
        """Lines of tc for one end of a cable; `leaving`: the host's end."""
        # A burst of 10 ms at the rate, and at least two of the 64 KB packets that TCP hands down.
        burst = max(131_072, int(self.rate_mbit * 1e6 / 8 * 0.01))
        rate = f"tbf rate {int(self.rate_mbit * 1e6)}bit burst {burst} latency 100ms" if self.rate_mbit else ""
        if leaving and (self.delay_ms or self.loss) and not self.relayed:
            netem = f"netem limit 10000 delay {self.delay_ms}ms {self.jitter_ms}ms loss {100 * self.loss}%"
            lines = [f"qdisc add dev {device} root handle 1: {netem}"]
            return lines + ([f"qdisc add dev {device} parent 1:1 handle 10: {rate}"] if rate else [])
        return [f"qdisc add dev {device} root {rate}"] if rate else []

    def stream(self, sender: int, receiver: int, *, nbytes: int, timeout_s: float = 120.0) -> float:
        """Bytes per second of one TCP stream between two hosts, from its first byte to its last."""
        script, to = str(Path(__file__).with_name("stream.py")), self.hosts[receiver]
        receiving = to.popen([sys.executable, script, "receive", to.address], stdout=subprocess.PIPE, text=True)
        port = receiving.stdout.readline().strip()
        self.hosts[sender].run([sys.executable, script, "send", to.address, port, str(nbytes)], timeout_s)
        got, seconds = receiving.communicate(timeout=timeout_s)[0].split()
        if int(got) != nbytes:
            raise RuntimeError(f"stream: {got} of {nbytes} bytes arrived")
        return nbytes / float(seconds)


def shares(num_hosts: int) -> list[set[int]]:
    """Each host's share of this process's cores, which hosts have in turn; with more hosts than cores, one each."""
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[index % len(cores) :: num_hosts] if num_hosts <= len(cores) else [cores[index % len(cores)]])
            for index in range(num_hosts)]  # fmt: skip


def _relay(host: int, switch: int, port: str, *numbers: float) -> subprocess.Popen:
    relay = subprocess.Popen(
        [sys.executable, "-m", "tests.network.relay", str(host), str(switch), port, *map(str, numbers)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if relay.stdout.readline() != "ready\n":
        raise RuntimeError("relay: did not start; its output says why")
    return relay


def _close(process: subprocess.Popen) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
