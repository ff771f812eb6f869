"""A generator that keeps old weights is found at the load, whatever the dtype."""

import pytest

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.types import OptimParams

NAME = "layers.1.feed_forward.w2.weight"


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_generator_that_keeps_a_tensor_of_the_version_before_is_lost_at_once(loop, dtype, tmp_path):
    from torchtitan_rl.model import vllm_internals
    from torchtitan_rl.run.controller import Controller

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
                with pytest.raises(RuntimeError, match=f"the engine holds other values of {NAME} than were sent"):
                    await controller.publish()
            finally:
                vllm_internals.shut_down(engine._engine)  # an engine that has failed leaves vLLM's globals as they were

    loop.run_until_complete(run())
