"""Weights that are not finite end a run for good, and say which tensor; a snapshot stays while it is played with."""

from collections import Counter

import pytest

from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.types.ends import Ended
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite


class Generator:
    policy_version = 5

    def __init__(self, error=None):
        self.error = error

    async def push_and_pull(self):
        if self.error is not None:
            raise self.error
        return 5


async def test_a_run_whose_weights_are_not_finite_ends_for_good_and_other_failures_stay_what_they_are():
    assert await PolicyWeights({}, Generator(), None).publish() == 5
    with pytest.raises(Ended, match="policy_version=6: layers.0.w1 has a NaN or an infinity"):
        await PolicyWeights({}, Generator(WeightsNotFinite(NotFinite(version=6, tensor="layers.0.w1"))), None).publish()
    with pytest.raises(RuntimeError) as error:
        await PolicyWeights({}, Generator(RuntimeError("policy-0.push_weights: OSError: gone")), None).publish()
    assert not isinstance(error.value, Ended)


async def test_a_snapshot_that_is_replaced_stays_until_the_rollouts_of_its_batch_are_scored():
    held = Counter()

    class Versions:
        def pin(self, version, holder):
            held[version] += 1

        async def release(self, version, holder):
            held[version] -= 1

    generator = Generator()
    weights = PolicyWeights({}, generator, Versions())
    async with weights.holding_teacher() as version:
        generator.policy_version = 6
        await weights.set_teacher(6)
        assert version == 5 and +held == {5: 1, 6: 1}
    assert +held == {6: 1} and await weights.teacher() == 6
