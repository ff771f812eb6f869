"""A process that waits to become a generator rank."""

from __future__ import annotations

import os

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl import adapters
from torchtitan_rl.actors.process import heavy_imports

__all__ = ["Spare"]


class Spare(Actor):
    """Imports ahead what a generator needs: most of the time that a replacement takes to start."""

    @concurrent_endpoint
    async def prepare(self, eager: bool) -> int:
        """Imports vLLM and the generator, and opens no device. Returns the process id."""
        adapters.prepare_vllm(eager=eager)
        with heavy_imports():
            import vllm.v1.engine.llm_engine  # noqa: F401

            import torchtitan_rl.actors.generator_rank
            import torchtitan_rl.weights.store  # noqa: F401
        return os.getpid()

    @concurrent_endpoint
    async def claim(self, devices: str) -> None:
        """Gives the process its GPUs, before anything opens one; empty without GPUs."""
        if devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
