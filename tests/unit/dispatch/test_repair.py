"""How often a replica may be replaced, and what a replacement must hold."""

import pytest

from torchtitan_rl.dispatch.repair import Repair, TooManyRestarts
from torchtitan_rl.dispatch.replica import ReplicaLost


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Versions:
    served = 3


class Fake:
    """A replica that pulls what it is told, after `outcomes` that go wrong."""

    def __init__(self, versions, *outcomes):
        self.versions, self.outcomes, self.loaded_version, self.lost = (
            versions,
            list(outcomes),
            None,
            "its process died",
        )
        self.mesh = type("Mesh", (), {"role": "generator-0"})()

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
    versions = Versions()
    good = Fake(versions)
    made = repair([RuntimeError("no memory"), good])
    assert await made.replacement(Fake(versions), lambda mesh: mesh) is good
    assert good.loaded_version == 3 and made.num_restarts == 2


async def test_a_version_published_meanwhile_is_loaded_instead():
    versions = Versions()
    replica = Fake(versions, 4, 5)
    made = repair([replica])
    await made.replacement(Fake(versions), lambda mesh: mesh)
    assert replica.loaded_version == 5 and made.num_restarts == 1


async def test_a_replacement_that_fails_while_it_catches_up_holds_no_version_any_more():
    class Behind(Fake):
        async def pull(self, version):
            await super().pull(version)
            self.versions.served, self.outcomes = 4, [ReplicaLost("its process died")]

    versions = Versions()
    behind, good = Behind(versions), Fake(versions)
    await repair([behind, good]).replacement(Fake(versions), lambda mesh: mesh)
    assert (behind.loaded_version, good.loaded_version) == (None, 4)


async def test_restarts_are_counted_within_a_window():
    versions, clock = Versions(), Clock()
    made = repair([Fake(versions) for _ in range(4)], clock)
    for now in (0, 50, 101):
        clock.now = now
        await made.replacement(Fake(versions), lambda mesh: mesh)
    clock.now = 149
    with pytest.raises(TooManyRestarts, match=r"=2: so many .* within 100 s, .* \(its process died\); look at"):
        await made.replacement(Fake(versions), lambda mesh: mesh)


async def test_a_replacement_that_never_works_ends_in_too_many():
    versions = Versions()
    made = repair([Fake(versions, ReplicaLost("dead again")), Fake(versions, ReplicaLost("dead again"))])
    with pytest.raises(TooManyRestarts, match=r"\(dead again\)"):
        await made.replacement(Fake(versions), lambda mesh: mesh)
