"""How often a replica may be replaced, and what a replacement must hold."""

import asyncio

import pytest

from tests.kit.clock import Clock
from tests.kit.mesh import Mesh
from tests.kit.versions import Versions
from torchtitan_rl.dispatch.repair import Repair, TooManyRestarts
from torchtitan_rl.dispatch.replica import ReplicaLost


class Replica:
    """Pulls what it is told, after `outcomes` that go wrong."""

    def __init__(self, versions, *outcomes):
        self.versions, self.outcomes, self.mesh = versions, list(outcomes), Mesh("generator-0")
        self.loaded_version, self.lost = None, "its process died"

    async def pull(self, version):
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            if isinstance(outcome, int):  # another version is published, and this one deleted
                self.versions.served = outcome
                raise ValueError(f"policy_version={version}: is not published")
            raise outcome
        self.loaded_version = version

    async def release(self):
        self.loaded_version = None


def repair(meshes, clock=None, **limits):
    async def start(role):
        assert role == "generator-0"
        mesh = meshes.pop(0)
        if isinstance(mesh, Exception):
            raise mesh
        return mesh

    limits = {"max_restarts": 2, "window_s": 100.0, "probe_every_s": 0.001, "hang_timeout_s": 1.0} | limits
    return Repair(start, clock=clock or Clock(), **limits)


async def test_a_replacement_that_does_not_start_counts_and_is_replaced():
    versions = Versions(3)
    good = Replica(versions)
    made = repair([RuntimeError("no memory"), good])
    assert await made.replacement(Replica(versions), lambda mesh: mesh) is good
    assert good.loaded_version == 3 and made.num_restarts == 2


async def test_a_version_published_meanwhile_is_loaded_instead():
    versions = Versions(3)
    replica = Replica(versions, 4, 5)
    made = repair([replica])
    await made.replacement(Replica(versions), lambda mesh: mesh)
    assert replica.loaded_version == 5 and made.num_restarts == 1


async def test_a_replacement_that_fails_while_it_catches_up_holds_no_version_any_more():
    class Behind(Replica):
        async def pull(self, version):
            await super().pull(version)
            self.versions.served, self.outcomes = 4, [ReplicaLost("its process died")]

    versions = Versions(3)
    behind, good = Behind(versions), Replica(versions)
    await repair([behind, good]).replacement(Replica(versions), lambda mesh: mesh)
    assert (behind.loaded_version, good.loaded_version) == (None, 4)


async def test_restarts_are_counted_within_a_window():
    versions, clock = Versions(3), Clock()
    made = repair([Replica(versions) for _ in range(4)], clock)
    for now in (0, 50, 101):
        clock.now = now
        await made.replacement(Replica(versions), lambda mesh: mesh)
    clock.now = 149
    with pytest.raises(TooManyRestarts, match=r"=2: so many .* within 100 s, .* \(its process died\); look at"):
        await made.replacement(Replica(versions), lambda mesh: mesh)


async def test_a_replacement_that_never_works_ends_in_too_many():
    versions = Versions(3)
    made = repair([Replica(versions, ReplicaLost("dead again")), Replica(versions, ReplicaLost("dead again"))])
    with pytest.raises(TooManyRestarts, match=r"\(dead again\)"):
        await made.replacement(Replica(versions), lambda mesh: mesh)


async def test_a_probe_that_fails_in_an_unforeseen_way_is_made_again(caplog):
    class Broken(Mesh):
        asked = 0

        async def call_leader(self, operation, *args, timeout_s=None):
            self.asked += 1
            if self.asked == 1:
                raise KeyError("mesh")
            raise RuntimeError("no sign of life")

    replica, lost = Replica(Versions(3)), asyncio.Event()
    replica.lost, replica.mesh = None, Broken("generator-0")
    probing = asyncio.ensure_future(repair([]).probe(lambda: replica, lambda *_: lost.set()))
    await asyncio.wait_for(lost.wait(), 5)
    probing.cancel()
    assert "could not be asked for a sign of life" in caplog.text
