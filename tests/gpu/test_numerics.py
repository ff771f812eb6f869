"""One GPU: what a dtype, an attention and activation checkpointing change in gradients and updates of one rank."""

import pytest

from tests.gpu.agreement import gradient
from tests.gpu.conftest import GRADIENT, LOGPROB, UPDATE
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, recorded_batches, replay, trainer_config, trainer_mesh

pytestmark = pytest.mark.gpu

DATA = random_datums(12, max_len=40)
VARIANTS = {
    "bfloat16": dict(training__mixed_precision_param="bfloat16"),
    "bfloat16, sdpa": dict(training__mixed_precision_param="bfloat16", attention="sdpa"),
    "bfloat16, recomputed": dict(training__mixed_precision_param="bfloat16", activation_checkpoint="full"),
}


async def numbers(config):
    """(log-probabilities, gradient, update of ten steps) of a rank that starts from the seed's weights."""
    async with trainer_mesh(config) as mesh:
        found = await gradient(client(mesh), [DATA])
        await client(mesh).reset_optimizer()
        update, _ = await replay(client(mesh), recorded_batches(10))
        return *found, flat(update)


@pytest.fixture(scope="module")
def exact(loop):
    """In float32, with scaled-dot-product attention."""
    return loop.run_until_complete(numbers(trainer_config()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_stays_near_float32(loop, exact, variant):
    logprobs, grads, update = loop.run_until_complete(numbers(trainer_config(**VARIANTS[variant])))
    expected_logprobs, expected_grads, expected_update = exact
    assert expected_grads.norm() > 0
    assert (logprobs - expected_logprobs).abs().max() <= LOGPROB
    assert relative_l2(grads, expected_grads) <= GRADIENT
    assert relative_l2(update, expected_update) <= UPDATE
