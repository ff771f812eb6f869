"""A launch that fails leaves nothing behind that another launch in the same process would meet."""

import asyncio
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from tests.unit.train.test_resume import QUICKSTART
from torchtitan_rl.config.load import load_config
from torchtitan_rl.serve.gateway import Gateway
from torchtitan_rl.train import controller
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.start import dated


class Backend:
    """Starts nothing; `failing` raises before there is a launcher."""

    in_this_process, has_engines = True, False

    def __init__(self, *, failing=False):
        self.failing, self.stopped, self.ends = failing, 0, []
        """`ends`: what was ended, in order."""

    def settle(self, config):
        return config

    def hosts_for(self, *arguments, **keywords):
        return None

    def missing_weights(self, config):
        return ""

    def device_name(self, hosts):
        return None

    def launcher(self, *arguments):
        if self.failing:
            raise RuntimeError("there is no launcher")
        return self

    async def stop(self):
        self.stopped += 1
        self.ends.append("the launcher")


class Unpublished(Controller):
    """A controller whose first publication fails."""

    def __init__(self, *arguments):
        pass

    async def publish(self):
        raise RuntimeError("the store is gone")


@pytest.fixture
def config(tmp_path, monkeypatch):
    async def nothing(*arguments):
        pass

    async def start(config, inputs, launcher, *arguments):
        return SimpleNamespace(generator=SimpleNamespace(close=lambda: launcher.ends.append("the sampling client")))

    monkeypatch.setattr(controller, "start", start)
    monkeypatch.setattr(controller, "check_reward", nothing)
    config = load_config(str(QUICKSTART))
    config.output_dir, config.record.schedule = str(tmp_path / "run"), False
    return config


async def test_a_failure_after_the_gateway_is_open_closes_it(config, monkeypatch):
    gateways = []

    async def open_gateway(config):
        gateways.append(await Gateway(context_tokens=100, vocab_size=10).__aenter__())
        return gateways[0]

    backend = Backend()
    monkeypatch.setattr(controller, "open_gateway", open_gateway)
    monkeypatch.setattr(controller, "backend_of", lambda name: backend)
    with pytest.raises(RuntimeError, match="the store is gone"):
        await Unpublished.launch(config)
    assert backend.stopped == 1
    assert backend.ends == ["the sampling client", "the launcher"]  # a probe would replace what has been stopped
    address = urlsplit(gateways[0].url)
    with pytest.raises(OSError):
        await asyncio.open_connection(address.hostname, address.port)


async def test_a_failure_before_there_is_a_launcher_frees_the_directory(config, monkeypatch):
    monkeypatch.setattr(controller, "backend_of", lambda name: Backend(failing=True))
    for resume_from in ("", "auto"):  # a directory in use would be refused
        with pytest.raises(RuntimeError, match="there is no launcher"):
            await Unpublished.launch(config, resume_from=resume_from)


@pytest.mark.parametrize("name", ["", "../elsewhere", "a/b"])
def test_a_name_that_is_no_directory_of_runs_is_refused(name):
    with pytest.raises(ValueError, match="names no directory in runs/"):
        dated(name)
    assert dated("mine").startswith("runs/mine-")
