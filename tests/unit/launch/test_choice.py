"""The backends by name: what each answers before anything starts."""

import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT
from torchtitan_rl.cli.main import _parser
from torchtitan_rl.config.load import load_config
from torchtitan_rl.launch.attach import Hosts
from torchtitan_rl.launch.choice import BACKENDS
from torchtitan_rl.launch.inventory import Host


@pytest.fixture
def config():
    return load_config(str(ROOT / "configs" / "quickstart.py"))


def test_the_command_offers_every_backend():
    for name, backend in BACKENDS.items():
        assert _parser("train").parse_args(["train", "config.py", "--backend", name]).backend == name
        assert backend.in_this_process == (name == "local")
    with pytest.raises(SystemExit):
        _parser("train").parse_args(["train", "config.py", "--backend", "nowhere"])


@pytest.mark.parametrize("name", BACKENDS)
def test_hosts_are_for_actors_alone(config, name):
    hosts = Hosts(mesh=None, hosts=[Host(address="there:1", num_cores=2, devices=[])], attached=True)
    config = BACKENDS[name].settle(config)
    if BACKENDS[name].takes_hosts:
        assert BACKENDS[name].hosts_for(config, hosts, generators_only=False) is hosts
    else:
        with pytest.raises(ValueError, match=f"backend='{name}': is this process alone, and 1 hosts are attached"):
            BACKENDS[name].hosts_for(config, hosts, generators_only=False)


def test_a_service_has_the_weights_that_are_missing_here(config):
    config.model.pretrained = True
    assert {name: bool(backend.missing_weights(config)) for name, backend in BACKENDS.items()} == {
        "actors": True,
        "local": True,
        "tinker": False,
    }


def test_a_config_is_checked_without_monarch_and_vllm():
    code = (
        "import sys; from torchtitan_rl.launch.choice import BACKENDS;"
        "from torchtitan_rl.config.load import load_config;"
        "config = load_config('configs/quickstart.py');"
        "[backend.check(backend.settle(config), generators_only=False) for backend in BACKENDS.values()];"
        "assert not {'monarch', 'vllm', 'torchstore'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
