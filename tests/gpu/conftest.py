"""GPU tests are skipped where there is no GPU: `scripts/test.sh -m gpu tests/gpu`.

TORCHTITAN_RL_GPU_TESTS_ON_CPU=1 runs their bodies on a CPU instead, to find mistakes in the tests themselves; all
bounds hold there too. What only a GPU has (device memory that is freed) is left out then.

Bounds. Trainers here compute in bfloat16, because FlashAttention takes nothing else; generators in bfloat16 too, unless
a test says otherwise. bfloat16 keeps 8 bits, so that each rounding changes a number by up to 0.4%. Kernels on a GPU may
add up in another order from call to call (atomic additions in attention's backward and in the embedding's gradient), so
what is bit for bit equal on a CPU is compared with a bound.
"""

import os

import pytest
import torch

from tests.integration.conftest import loop, small_config  # noqa: F401  (a fixture)

ON_CPU = os.environ.get("TORCHTITAN_RL_GPU_TESTS_ON_CPU") == "1"

GRADIENT = 2e-2
"""Relative L2 of two bfloat16 gradients of the same data in other microbatches, or on another layout: products of other
sizes round otherwise. A mistake in a layout changes a gradient by more: the lost term of docs/architecture.md by 5%."""
UPDATE = 0.15
"""Relative L2 of ten AdamW updates of the same data. AdamW divides by the size of each gradient and so turns the
rounding of tiny ones into more: bfloat16 against float32 gives 0.05 on a CPU (docs/numerics.md)."""
LOGPROB, KL = 0.1, 1e-3
"""Largest difference and mean k3 KL of log-probabilities of generator and trainer: docs/numerics.md, for bfloat16."""


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """Skips every test here without a GPU."""
    if not torch.cuda.is_available() and not ON_CPU:
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def two_gpus(gpu):
    """Skips without a second GPU: NCCL refuses two ranks on one."""
    if torch.cuda.device_count() < 2 and not ON_CPU:
        pytest.skip("needs two CUDA devices")


def gpu_config(output_dir, **overrides):
    """The quickstart's model with short phases, trainer and generator in bfloat16."""
    defaults = {"generator__dtype": "bfloat16", "trainer__training__mixed_precision_param": "bfloat16"}
    return small_config(output_dir, **(defaults | overrides))


@pytest.fixture(scope="session")
def stack(loop, gpu, tmp_path_factory):  # noqa: F811
    """One running stack, shared by the tests that do not break it."""
    from torchtitan_rl.train.controller import Controller

    controller = loop.run_until_complete(Controller.launch(gpu_config(tmp_path_factory.mktemp("gpu") / "shared")))
    yield controller
    loop.run_until_complete(controller.close())
