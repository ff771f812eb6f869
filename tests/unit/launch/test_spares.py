"""Spare processes that hang; tests/integration/test_repair.py has one that works."""

import asyncio
from types import SimpleNamespace

import pytest

from torchtitan_rl.launch.inventory import Place
from torchtitan_rl.launch.spares import Spares

PLACE = Place(hosts=[0], devices=[""])


class Processes:
    """Processes with one actor each; the endpoint named `hangs` never answers."""

    def __init__(self, hangs):
        self.prepare, self.claim = (self._endpoint(name, hangs) for name in ("prepare", "claim"))

    def _endpoint(self, name, hangs):
        async def call(argument):
            if name == hangs:
                await asyncio.Event().wait()
            return [({}, 7)]

        return SimpleNamespace(call=call)

    def spawn(self, name, actor):
        return self


@pytest.mark.parametrize("hangs, taken", [("", True), ("prepare", False), ("claim", False)])
async def test_a_spare_that_hangs_is_given_up_after_its_deadline(hangs, taken, caplog):
    async def spawn(name, ranks, place):
        return Processes(hangs)

    spares = Spares(1, 1, eager=True, timeout_s=0.05, spawn=spawn, on_pids=lambda pids: None)
    spares.fill()
    assert (await asyncio.wait_for(spares.take(PLACE), 5) is not None) == taken
    assert (f"{hangs}: no answer within 0.05 s" in caplog.text) != taken
