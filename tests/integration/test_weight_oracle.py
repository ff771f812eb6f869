"""A generator that keeps old weights is found at the load, whatever the dtype."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In a process of its own: an engine that has failed leaves vLLM's globals as they were.
SCRIPT = """
import asyncio, sys
from pathlib import Path
from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.types import OptimParams

NAME = "layers.1.feed_forward.w2.weight"

async def main(directory, dtype):
    controller = await Controller.launch(small_config(Path(directory) / "run", generator__dtype=dtype), backend="local")
    await controller.publish()  # an honest load
    model = controller.launcher._generators[0].engine.model
    load = model.load_weights
    model.load_weights = lambda weights: load(
        [(name, model.canonical_state()[name].clone() if name == NAME else tensor) for name, tensor in weights]
    )
    await controller.trainer.forward_backward(random_datums(4), cross_entropy)
    await controller.trainer.optim_step(OptimParams(lr=1e-2))
    try:
        await controller.publish()
    except RuntimeError as error:
        print("refused:", error)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_generator_that_keeps_a_tensor_of_the_version_before_is_lost_at_once(dtype, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=ROOT)
    refused = next(line for line in done.stdout.splitlines() if line.startswith("refused: "))
    assert "the engine holds other values of layers.1.feed_forward.w2.weight than were sent" in refused, done.stderr
