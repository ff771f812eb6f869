"""A generator that keeps old weights is found at the load, whatever the dtype."""

import asyncio

import pytest

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.types import OptimParams, SamplingParams

NAME = "layers.1.feed_forward.w2.weight"


@pytest.mark.parametrize("dtype, requests", [pytest.param("float32", 0, marks=pytest.mark.slow), ("bfloat16", 8)])
def test_a_generator_that_keeps_a_tensor_of_the_version_before_is_lost_at_once(loop, dtype, requests, tmp_path):
    """With requests in the engine the weights are checked while the engine goes on."""
    from torchtitan_rl.engine import vllm_internals
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = small_config(tmp_path / "run", generator__dtype=dtype)
        async with await Controller.launch(config, backend="local") as controller:
            engine = controller.launcher._generators[0].engine
            try:
                await controller.publish()  # an honest load
                load, model = engine.model.load_weights, engine.model
                model.load_weights = lambda weights: load(
                    [(n, model.canonical_state()[n].clone() if n == NAME else tensor) for n, tensor in weights]
                )
                await controller.trainer.forward_backward(random_datums(4), cross_entropy)
                await controller.trainer.optim_step(OptimParams(lr=1e-2))
                params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
                flying = [asyncio.ensure_future(controller.generator.sample([5], params)) for _ in range(requests)]
                await asyncio.sleep(0.03)
                with pytest.raises(RuntimeError, match=f"the engine holds other values of {NAME} than were sent"):
                    await controller.publish()
                await asyncio.gather(*flying, return_exceptions=True)
            finally:
                vllm_internals.shut_down(engine._engine)  # an engine that has failed leaves vLLM's globals as they were

    loop.run_until_complete(run())
