"""Which sandboxes a config holds, and which hosts are this machine."""

import dataclasses
import functools
from pathlib import Path

from torchtitan_rl.config.load import load_config
from torchtitan_rl.launch.attach import Hosts
from torchtitan_rl.launch.inventory import Host
from torchtitan_rl.launch.sandboxes import is_this_machine, sandboxes_of, start_sandbox_hosts
from torchtitan_rl.rollout.external import external
from torchtitan_rl.tasks.program_repair import Repair
from torchtitan_rl.tasks.sandbox.config import SandboxConfig

QUICKSTART = load_config(str(Path(__file__).parents[3] / "configs" / "quickstart.py"))
SANDBOX = SandboxConfig(memory_gib=0.5)


def with_workflow(workflow):
    return dataclasses.replace(QUICKSTART, algorithm=dataclasses.replace(QUICKSTART.algorithm, workflow=workflow))


def wrapping(workflow):
    @functools.wraps(workflow)
    async def wrapped(*args, **kwargs):
        return await workflow(*args, **kwargs)

    return wrapped


def test_a_sandbox_is_seen_in_a_task_and_in_a_workflow_however_it_is_wrapped():
    assert sandboxes_of(QUICKSTART) == {}
    agent = external(["agent"], sandbox=SANDBOX)
    assert sandboxes_of(with_workflow(agent)) == {"algorithm.workflow.sandbox": SANDBOX}
    for wrapped in (wrapping(agent), functools.partial(agent), functools.partial(wrapping(agent), seed=3)):
        assert list(sandboxes_of(with_workflow(wrapped)).values()) == [SANDBOX]
    assert sandboxes_of(with_workflow(external(["agent"]))) == {}
    repair = dataclasses.replace(QUICKSTART, task=Repair.Config(sandbox=SANDBOX))
    assert sandboxes_of(repair) == {"task.sandbox": SANDBOX}


def test_addresses_of_this_machines_interfaces_are_this_machine():
    assert is_this_machine("127.0.0.1:26600") and is_this_machine("localhost:26600")
    assert not is_this_machine("127.0.0.2:26600")  # of the loopback, and of no interface
    assert not is_this_machine("192.0.2.1:26600") and not is_this_machine("no-such-host.invalid:26600")


async def test_no_process_is_started_without_a_sandbox_or_another_host():
    async def spawn(*arguments):
        raise AssertionError(arguments)

    agent = with_workflow(external(["agent"], sandbox=SANDBOX))
    here, there = Host(address="127.0.0.1:5", num_cores=2), Host(address="192.0.2.1:5", num_cores=2)
    for config, hosts in (
        (QUICKSTART, Hosts(mesh=None, hosts=[here, there], attached=True)),
        (agent, Hosts(mesh=None, hosts=[here], attached=True)),
        (agent, Hosts(mesh=None, hosts=[here])),
    ):
        assert await start_sandbox_hosts(config, hosts, spawn, timeout_s=1) is None
