"""Hosts that join a run and leave it, with replicas in this process; tests/integration has real ones."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.kit.replicas import Mesh, client_of, sample_all, settle
from torchtitan_rl.launch import attach
from torchtitan_rl.launch.actors import ActorLauncher, _Replica
from torchtitan_rl.launch.gpus import Cuda
from torchtitan_rl.launch.inventory import Devices, Host, MeshSize
from torchtitan_rl.launch.joined_hosts import JoinedHosts, num_replicas
from torchtitan_rl.launch.replicas import Replicas


def config_of(*, degree=1, transport="auto"):
    generator, weight_sync = (SimpleNamespace(tensor_parallel_degree=degree), SimpleNamespace(transport=transport))
    return SimpleNamespace(generator=generator, weight_sync=weight_sync)


class Hosts:
    """Hosts without Monarch: `refused` are workers that raise, `on_leave` is what a worker of each index calls."""

    def __init__(self):
        self.hosts, self.joined, self.left = [host("10.0.0.1:1")], set(), set()
        self.refused, self.on_leave = {}, {}

    def present(self):
        return [index for index in range(len(self.hosts)) if index not in self.left]

    async def join(self, worker, timeout_s, on_leave):
        if worker in self.refused:
            raise self.refused[worker]
        self.hosts.append(host(worker.removeprefix("tcp://")))
        index = len(self.hosts) - 1
        self.joined.add(index)
        self.on_leave[index] = on_leave
        return index


class Launcher:
    """Starts replicas on hosts in this process; a role in `never` does not get ready."""

    start_timeout_s = 1.0

    def __init__(self):
        self.hosts, self.meshes, self.places, self.never = Hosts(), {}, {"generator-0": 0}, set()
        self.closed, self.added = set(), 0

    def add_host(self):
        self.added += 1

    def close_host(self, index):
        self.closed.add(index)

    async def remove_host(self, index):
        for role in self.replicas_on(index):
            await self.stop(role)
        self.hosts.joined.discard(index)
        self.hosts.left.add(index)

    def replicas_on(self, index):
        return [role for role, place in self.places.items() if place == index]

    async def start(self, role, index):
        self.places[role] = index
        if role in self.never:
            await asyncio.Event().wait()
        self.meshes[role] = Mesh(role)
        return self.meshes[role]

    async def stop(self, role):
        self.places.pop(role, None)


async def run_of(num_replicas=1, **config):
    """(joined hosts, launcher, client) of a run with so many replicas, all on its first host."""
    meshes, versions, client = client_of(num_replicas)
    await client.pull(await versions.publish())
    launcher = Launcher()
    launcher.meshes = {mesh.role: mesh for mesh in meshes}
    replicas = Replicas(client, start=launcher.start, stop=launcher.stop)
    return JoinedHosts(launcher, replicas, config_of(**config)), launcher, client


def host(address, num_gpus=0, error=""):
    devices = [str(index) for index in range(num_gpus)]
    cuda = Cuda(driver="", driver_cuda="", torch_cuda="13.0", torch_version="2.12", error=error) if error else None
    return Host(address=address, num_cores=4, devices=devices, cuda=cuda)


async def test_a_host_that_joins_brings_a_replica_and_takes_it_away_after_its_answers():
    hosts, launcher, client = await run_of()
    await hosts.join("tcp://10.0.0.2:1")
    assert hosts.addresses() == ["10.0.0.1:1", "10.0.0.2:1"] and launcher.places == {"generator-0": 0, "generator-1": 1}
    joined = launcher.meshes["generator-1"]
    joined.slow = [[2]]
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    leaving = asyncio.ensure_future(hosts.leave("tcp://10.0.0.2:1"))
    await settle()
    assert joined.sampled == [[2]] and launcher.closed == {1} and not leaving.done()
    joined.released.set()
    await leaving
    assert [answer.tokens for answer in await answers] == [[1], [2]]
    assert hosts.addresses() == ["10.0.0.1:1"] and client.health() == {"generator-0": "healthy"}
    await hosts.join("tcp://10.0.0.2:1")  # it may come again
    assert launcher.places == {"generator-0": 0, "generator-1": 2} and launcher.added == 2


async def test_a_host_that_a_scheduler_takes_back_has_left_when_its_time_is_over():
    hosts, launcher, client = await run_of()
    await hosts.join("tcp://10.0.0.2:1")
    joined = launcher.meshes["generator-1"]
    joined.held_up = asyncio.Event()
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    for seconds in (5.0, 0.1):  # USR1, and then SIGTERM
        await asyncio.to_thread(launcher.hosts.on_leave[1], 1, seconds)
    while launcher.hosts.joined or joined.aborted != [0, 1]:  # it is given up in the background
        await asyncio.sleep(0.02)
    assert client.health() == {"generator-0": "healthy"}
    joined.broken["sample"] = RuntimeError("generator-1-0.sample: its process died")
    joined.held_up.set()
    assert [answer.tokens for answer in await answers] == [[1], [2]]


async def test_a_host_that_has_to_leave_before_its_replicas_serve_has_not_joined():
    hosts, launcher, client = await run_of()
    launcher.never.add("generator-1")
    joining = asyncio.ensure_future(hosts.join("tcp://10.0.0.2:1"))
    await settle()
    with pytest.raises(ValueError, match="hosts=tcp://10.0.0.2:1: is joining already; wait for it"):
        await hosts.join("tcp://10.0.0.2:1")
    await asyncio.to_thread(launcher.hosts.on_leave[1], 1, 5.0)
    with pytest.raises(RuntimeError, match="host 10.0.0.2:1: had to leave before its replicas served"):
        await asyncio.wait_for(joining, 5)
    assert hosts.addresses() == ["10.0.0.1:1"] and client.health() == {"generator-0": "healthy"}
    assert launcher.places == {"generator-0": 0}


async def test_a_host_that_is_refused_leaves_nothing():
    hosts, launcher, _ = await run_of()
    launcher.hosts.refused["tcp://10.0.0.2:1"] = ValueError("host 10.0.0.2:1: has other code than this host")
    with pytest.raises(ValueError, match="has other code"):
        await hosts.join("tcp://10.0.0.2:1")
    hosts, launcher, _ = await run_of(degree=1, transport="shared_memory")
    with pytest.raises(
        ValueError, match="weight_sync.transport='shared_memory' carries weights on one host only; begin"
    ):
        await hosts.join("tcp://10.0.0.2:1")
    with pytest.raises(ValueError, match=r"hosts=tcp://10.0.0.1:1: has not joined this run \(joined hosts: none\)"):
        await hosts.leave("tcp://10.0.0.1:1")  # the run began with it
    assert launcher.added == 0


async def test_the_only_replicas_of_a_run_stay():
    hosts, launcher, client = await run_of()
    await hosts.join("tcp://10.0.0.2:1")
    await client.leave("generator-0")
    launcher.places.pop("generator-0")
    with pytest.raises(RuntimeError, match="host 10.0.0.2:1: has the run's only replicas; add others first"):
        await hosts.leave("tcp://10.0.0.2:1")
    assert launcher.closed == set() and client.serving() == ["generator-1"]


@pytest.mark.parametrize(
    "joining, first, degree, expected",
    [
        (host("b", 8), host("a", 8), 2, 4),
        (host("b", 3), host("a", 8), 2, 1),
        (host("b"), host("a"), 2, 1),
        (host("b"), host("a", 8), 1, "host b: a has GPUs and b has none; join hosts like those of the run"),
        (host("b", 8), host("a"), 1, "host b: b has GPUs and a has none; join hosts like those of the run"),
        (host("b", 1), host("a", 8), 2, "host b: has 1 GPUs, and a replica needs generator.tensor_parallel_degree=2"),
        (host("b", error="no driver"), host("a", 8), 1, "and no NVIDIA driver answers on b"),
    ],
)
def test_a_host_begins_as_many_replicas_as_its_gpus_carry(joining, first, degree, expected):
    if isinstance(expected, int):
        assert num_replicas(joining, first, config_of(degree=degree)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            num_replicas(joining, first, config_of(degree=degree))


def test_a_replica_goes_to_the_host_that_joined_and_none_to_one_that_leaves():
    hosts = [host("a", 2)]
    devices = Devices(hosts)
    hosts.append(host("b", 2))
    devices.add()

    def take(role, index=None):
        return devices.take(MeshSize(role=role, num_ranks=1, replica=True, host=index)).hosts

    assert [take(f"generator-{number}", 1) for number in range(2)] == [[1], [1]]
    with pytest.raises(ValueError, match="generator-2: needs 1 GPU on 1 host; free GPUs: 0 of 2 on b"):
        take("generator-2", 1)
    devices.give_back(MeshSize(role="generator-1", num_ranks=1, replica=True))
    devices.close(1)
    assert [take(f"generator-{number}") for number in (3, 4)] == [[0], [0]]
    with pytest.raises(ValueError, match="free GPUs: 0 of 2 on a"):
        take("generator-5")


class Slow:
    """Monarch's meshes of a host: they take a moment to stop. And its lease, whose worker is dead."""

    async def stop(self, *_):
        await asyncio.sleep(0.05)

    def answers(self, within_s):
        return False

    def end(self):
        pass


async def test_a_host_that_dies_while_it_is_asked_to_leave_is_removed_once():
    hosts = attach.Hosts(mesh=Slow(), hosts=[Host(address=f"10.0.0.{i}:1", num_cores=2) for i in (1, 2)], attached=True)
    hosts._single[1], hosts.leases[1] = Slow(), Slow()
    hosts.joined.add(1)
    launcher = ActorLauncher(log_dir=None, start_timeout_s=5, call_timeout_s=5, hosts=hosts)
    size = MeshSize(role="generator-1", num_ranks=1, replica=True, host=1)
    place = launcher._devices.take(size)
    launcher._replicas["generator-1"] = _Replica("generator-1", None, None, 0, size, place, processes=Slow())
    replicas = SimpleNamespace(serving=lambda: ["generator-0"], coming=lambda: [])
    gone = asyncio.ensure_future(launcher._host_gone("generator-1"))  # the repair
    await asyncio.sleep(0.02)
    await JoinedHosts(launcher, replicas, None).leave("tcp://10.0.0.2:1")
    assert await gone == "host 10.0.0.2:1 is gone"
    assert hosts.present() == [0] and not hosts.joined and not hosts.leases
