"""Which hosts and GPUs meshes get, and what is refused before anything starts."""

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl import platform
from torchtitan_rl.cli.replay import _host_of_engines
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.inventory import Devices, Host, MeshSize, Place, address_towards, check_fits, meshes
from torchtitan_rl.tasks.letter_sort import LetterSort


def cpu_hosts(num, num_cores=2):
    return [Host(address=f"10.0.0.{index}", num_cores=num_cores) for index in range(num)]


def gpu_hosts(num, num_gpus, num_cores=8):
    devices = [str(device) for device in range(num_gpus)]
    return [Host(address=f"10.0.0.{i}", num_cores=num_cores, devices=list(devices)) for i in range(num)]


def run_config(*, dp=1, num_hosts=1, generator_tp=1, num_replicas=1):
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig())
    config.trainer.parallelism.data_parallel_shard_degree, config.trainer.num_hosts = dp, num_hosts
    config.generator.tensor_parallel_degree, config.generator.num_replicas = generator_tp, num_replicas
    return config


def places(config, hosts):
    devices = Devices(hosts)
    return {mesh.role: devices.take(mesh) for mesh in meshes(config)}


def test_without_gpus_the_trainer_is_first_and_replicas_go_round_the_hosts_from_one_without_trainer():
    assert places(run_config(dp=4, num_hosts=2, num_replicas=3), cpu_hosts(3)) == {
        "policy": Place(hosts=[0, 1], devices=["", ""]),
        "generator-0": Place(hosts=[2], devices=[""]),
        "generator-1": Place(hosts=[0], devices=[""]),
        "generator-2": Place(hosts=[1], devices=[""]),
    }
    assert places(run_config(dp=2, num_hosts=2, num_replicas=2), cpu_hosts(2))["generator-0"].hosts == [0]
    assert places(run_config(), cpu_hosts(2))["generator-0"].hosts == [1]  # and no host is idle


def test_gpus_are_taken_in_order_and_replicas_skip_hosts_without_free_ones():
    assert places(run_config(dp=4, num_hosts=2, generator_tp=2, num_replicas=3), gpu_hosts(3, 4)) == {
        "policy": Place(hosts=[0, 1], devices=["0,1", "0,1"]),
        "generator-0": Place(hosts=[2], devices=["0,1"]),
        "generator-1": Place(hosts=[0], devices=["2,3"]),
        "generator-2": Place(hosts=[1], devices=["2,3"]),
    }
    assert places(run_config(dp=4, num_replicas=2), gpu_hosts(2, 4))["generator-0"] == Place(hosts=[1], devices=["0"])


def test_a_mesh_over_hosts_gets_neighbours():
    hosts = gpu_hosts(4, 2)
    hosts[1].devices = ["0"]
    taken = Devices(hosts).take(MeshSize(role="policy", num_ranks=4, num_hosts=2))
    assert taken == Place(hosts=[2, 3], devices=["0,1", "0,1"])


def test_gpus_are_not_shared_unless_asked():
    message = refusal(check_fits, run_config(dp=2), gpu_hosts(1, 2))
    assert message.startswith("generator-0: needs 1 GPU on 1 host; free GPUs: 0 of 2 on 10.0.0.0")
    devices = Devices(gpu_hosts(1, 2))
    devices.take(MeshSize(role="policy", num_ranks=2))
    shared = [
        devices.take(MeshSize(role=f"generator-{i}", num_ranks=1, replica=True, share_with="policy")) for i in range(2)
    ]
    assert [place.devices for place in shared] == [["0"], ["1"]]  # least used first
    with pytest.raises(ValueError, match="reference: needs 3 GPUs on 1 host; GPUs of policy to share: 2 of 2"):
        devices.take(MeshSize(role="reference", num_ranks=3, share_with="policy"))


def test_a_host_with_one_gpu_shares_it_among_its_meshes():
    taken = places(run_config(), gpu_hosts(1, 1))
    assert taken["policy"] == taken["generator-0"] == Place(hosts=[0], devices=["0"])
    assert "needs 2 GPUs" in refusal(check_fits, run_config(dp=2), gpu_hosts(1, 1))


def test_more_gpus_than_there_are_is_refused_with_the_numbers():
    message = refusal(check_fits, run_config(dp=16, num_hosts=2), gpu_hosts(2, 4))
    assert "policy: needs 8 GPUs on 2 hosts; free GPUs: 4 of 4 on 10.0.0.0, 4 of 4 on 10.0.0.1" in message


def test_more_hosts_than_the_launch_has_is_refused():
    message = refusal(check_fits, run_config(dp=3, num_hosts=3), cpu_hosts(2))
    assert "trainer.num_hosts=3" in message and "the launch has 2 hosts (10.0.0.0, 10.0.0.1)" in message


@pytest.mark.parametrize("num_hosts", [0, 2])
def test_hosts_that_do_not_divide_the_ranks_are_refused(num_hosts):
    message = refusal(check_fits, run_config(dp=3, num_hosts=num_hosts), cpu_hosts(2))
    assert f"trainer.num_hosts={num_hosts}" in message
    assert num_hosts == 0 or "3 ranks" in message


def test_at_most_two_ranks_of_a_kind_per_core():
    check_fits(run_config(dp=4, generator_tp=2, num_replicas=2), cpu_hosts(1))
    message = refusal(check_fits, run_config(generator_tp=2, num_replicas=3), cpu_hosts(1))
    assert "would make 6 generator ranks on 10.0.0.0, whose 2 cores carry at most 4" in message
    assert "would make 5 ranks of policy" in refusal(check_fits, run_config(dp=5), cpu_hosts(1))
    check_fits(run_config(generator_tp=2, num_replicas=3), cpu_hosts(2))


def test_a_replica_goes_to_a_host_whose_cores_carry_it():
    devices = Devices([Host(address="A", num_cores=1), Host(address="B", num_cores=2)])  # two ranks and four
    sizes = [MeshSize(role=f"generator-{i}", num_ranks=1, replica=True) for i in range(7)]
    assert [devices.take(size).hosts for size in sizes[:6]] == [[0], [1], [0], [1], [1], [1]]
    message = refusal(devices.take, sizes[6])
    assert "generator-6: would make 3 generator ranks on A, whose 1 core carry at most 2" in message
    devices.give_back(sizes[1])
    assert devices.take(sizes[6]).hosts == [1]


def test_the_host_of_a_replay_has_room_for_all_engines_of_the_record():
    config = run_config(generator_tp=2, num_replicas=2 * platform.num_cores())
    assert "generator ranks" in refusal(check_fits, config, [Host(address="this host", num_cores=platform.num_cores())])
    (host,) = _host_of_engines(config).hosts
    assert host.num_cores == platform.num_cores() and host.ranks_per_core == 4
    if not host.devices:
        check_fits(config, [host])
    (host,) = _host_of_engines(run_config()).hosts
    assert host.ranks_per_core == 2


@pytest.mark.parametrize("kind", ["trainer", "generator"])
def test_more_threads_than_cores_are_refused(kind):
    config = run_config()
    getattr(config, kind).num_threads = 3
    assert f"{kind}.num_threads=3: 10.0.0.0 has 2 cores" in refusal(check_fits, config, cpu_hosts(1))


def test_the_address_that_leads_to_a_host():
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
    with pytest.raises(ValueError, match="host='no.such.host.invalid': cannot be resolved"):
        address_towards("no.such.host.invalid", 29500)
    with pytest.raises(ValueError, match="host='::1': cannot be resolved or routed to by IPv4"):
        address_towards("::1", 29500)


def test_a_host_that_no_mesh_uses_is_refused():
    assert refusal(check_fits, run_config(), cpu_hosts(3)) == (
        "hosts=3: the config's meshes use 2 of them, 10.0.0.2 would be idle; raise trainer.num_hosts or "
        "generator.num_replicas, or launch on fewer hosts"
    )
    check_fits(run_config(num_replicas=2), cpu_hosts(3))


def test_generators_alone_need_no_room_for_the_trainer():
    config = run_config(dp=8)
    assert "policy: needs 8 GPUs" in refusal(check_fits, config, gpu_hosts(1, 2))
    check_fits(config, gpu_hosts(1, 2), generators_only=True)
