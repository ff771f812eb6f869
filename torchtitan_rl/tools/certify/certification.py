"""All checks of a model, stage by stage; after a stage with a broken line the rest is not run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.launch.local import LocalLauncher
from torchtitan_rl.launch.stack import start_stack
from torchtitan_rl.tools.certify import (
    forward_checks,
    gradient_checks,
    lora_checks,
    run_checks,
    sync_checks,
    token_checks,
)
from torchtitan_rl.tools.certify.certificate import CertificateLine
from torchtitan_rl.tools.certify.subject import CALL_S, Subject
from torchtitan_rl.tools.certify.token_checks import GreedyTokens
from torchtitan_rl.weights.versioned import MemoryStore

__all__ = ["LAYOUTS", "Certification", "certify"]

LAYOUTS = ((2, 1), (1, 2))
"""(FSDP ranks, TP ranks) of the trainer meshes that are always compared with one rank."""


@dataclass(kw_only=True)
class Certification:
    """The stages of one certification. Each yields its checks, and starts and stops all that they need."""

    subject: Subject
    scratch: Path
    layouts: tuple[tuple[int, int], ...] = LAYOUTS
    store: Callable[[], MemoryStore] = MemoryStore
    """Makes the store that weights travel through."""
    greedy: GreedyTokens | None = None
    """What transformers says; the stage `engine` fills it in."""
    one_rank: dict[str, Any] = field(default_factory=dict)
    """Gradients of one rank; the stage `trainer` fills them in."""

    @asynccontextmanager
    async def launcher(self) -> AsyncIterator[LocalLauncher]:
        launcher = LocalLauncher(
            log_dir=str(self.scratch / "logs"), start_timeout_s=CALL_S, call_timeout_s=CALL_S, store=self.store()
        )
        try:
            yield launcher
        finally:
            await launcher.stop()

    @asynccontextmanager
    async def stack(
        self,
        *,
        model_impl: Literal["torchtitan", "vllm"] = "torchtitan",
        lora: LoRAConfig | None = None,
        colocation: Literal["none", "all"] = "none",
    ) -> AsyncIterator[Stack]:
        config = self.subject.run_config(model_impl=model_impl, lora=lora)
        config.roles.colocation = colocation
        async with self.launcher() as launcher:
            yield await start_stack(config, launcher, self.subject.engine_directory)

    @property
    def export(self) -> Path:
        return self.scratch / "export"

    async def trainer(self) -> AsyncIterator[CertificateLine]:
        """A trainer of one rank beside transformers."""
        subject = self.subject
        yield (names := forward_checks.check_names(subject))
        if names.broken:  # there may be no such model to start
            return
        async with self.launcher() as launcher:
            mesh = await launcher.start_trainer(subject.trainer(), subject.model, role="policy", seed=0)
            trainer = gradient_checks.client(subject, mesh)
            yield await forward_checks.check_weights(subject, trainer)
            async for check in forward_checks.check_trainer(subject, trainer):
                yield check
            yield await forward_checks.check_documents_apart(subject, trainer)
            yield await gradient_checks.check_gradients(subject, trainer)
            yield await gradient_checks.check_packing(subject, trainer)
            self.one_rank = await gradient_checks.gradients(subject, trainer)

    async def engine(self) -> AsyncIterator[CertificateLine]:
        """The trainer's model inside vLLM: before and after a step, and an export."""
        subject, title = self.subject, "engine (torchtitan)"
        async with self.stack() as stack:
            await stack.generator.push_and_pull()
            async for check in forward_checks.check_engine(subject, stack.generator, title):
                yield check
            self.greedy = GreedyTokens.of(subject)
            yield await self.greedy.of_engine(stack.generator, title)
            async for check in token_checks.check_export(subject, stack.roles["policy"], self.greedy, self.export):
                yield check
            async for check in sync_checks.check_sync(subject, stack):
                yield check
            yield await sync_checks.check_logprobs_after_step(subject, stack, title)
            yield await sync_checks.check_cache(subject, stack, "prefix cache: an old one is not read after a sync")

    async def vllm(self) -> AsyncIterator[CertificateLine]:
        """vLLM's own model: of the export, and with the trainer's weights sent to it."""
        assert self.greedy is not None
        yield token_checks.check_vllm_alone(self.subject, self.greedy, self.export)
        if refusal := run_checks.refusal(self.subject, self.scratch / "run", model_impl="vllm"):
            yield CertificateLine(name="engine (vllm)", difference=None, note=refusal)
            return
        async with self.stack(model_impl="vllm") as stack:
            await stack.generator.push_and_pull()
            async for check in forward_checks.check_engine(self.subject, stack.generator, "engine (vllm)"):
                yield check
            yield await self.greedy.of_engine(stack.generator, "engine (vllm)")
            await sync_checks.take_step(self.subject, stack)
            await stack.generator.push_and_pull()
            yield await sync_checks.check_logprobs_after_step(self.subject, stack, "engine (vllm)")

    async def adapters(self) -> AsyncIterator[CertificateLine]:
        """LoRA, on a device that trainer and engine share."""
        lora = lora_checks.adapters_of(self.subject.shape)
        if not lora.target_modules:
            yield CertificateLine(
                name="LoRA", difference=None, note=f"no layer of a {self.subject.shape.name} has adapters"
            )
            return
        async with self.stack(lora=lora, colocation="all") as stack:
            async for check in lora_checks.check_adapters(self.subject, stack, self.scratch / "merged"):
                yield check
            yield await sync_checks.check_cache(
                self.subject, stack, "prefix cache: a sleeping one is not read after a sync"
            )

    async def run(self) -> AsyncIterator[CertificateLine]:
        """What a run adds."""
        async with self.launcher() as launcher:
            mesh = await launcher.start_trainer(self.subject.trainer(), self.subject.model, role="critic", seed=0)
            yield await run_checks.check_critic(self.subject, gradient_checks.client(self.subject, mesh))
        for check in await run_checks.check_grpo(self.subject, self.scratch / "run"):
            yield check

    async def meshes(self) -> AsyncIterator[CertificateLine]:
        """Trainers of several ranks, each a process."""
        async for check in gradient_checks.check_layouts(
            self.subject, self.layouts, str(self.scratch / "logs"), self.one_rank
        ):
            yield check
        if (2, 2) not in self.layouts:
            yield CertificateLine(
                name="gradients: FSDP 2, TP 2 = one rank", difference=None, note="four processes: --layouts 2x2"
            )


async def certify(
    shape: DecoderShape,
    hf: dict[str, Any],
    *,
    layouts: tuple[tuple[int, int], ...] = LAYOUTS,
    store: Callable[[], MemoryStore] = MemoryStore,
    note: Callable[[str], None] = lambda title: None,
) -> tuple[CertificateLine, ...]:
    """The checks of the small model that `hf` describes, which trainer and engine build as `shape`. `note` is called
    with the name of each stage."""
    checks: list[CertificateLine] = []
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", ignore_cleanup_errors=True) as scratch:
        subject = Subject.of(shape, hf, Path(scratch))
        certification = Certification(subject=subject, scratch=Path(scratch), layouts=layouts, store=store)
        stages: dict[str, Callable[[], AsyncIterator[CertificateLine]]] = {
            "trainer": certification.trainer,
            "engine": certification.engine,
            "vLLM's own model": certification.vllm,
            "LoRA": certification.adapters,
            "critic and GRPO": certification.run,
            "layouts": certification.meshes,
        }
        for title, stage in stages.items():
            if any(check.broken for check in checks):
                checks.append(CertificateLine(name=title, difference=None, note="not run: a line above is broken"))
                continue
            note(title)
            checks += await _of_stage(title, stage)
    return tuple(checks)


async def _of_stage(title: str, stage: Callable[[], AsyncIterator[CertificateLine]]) -> list[CertificateLine]:
    """The checks of a stage. What it raises is a broken line: the model at hand may be one that cannot be built."""
    checks: list[CertificateLine] = []
    try:
        async for check in stage():
            checks.append(check)
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        checks.append(CertificateLine(name=title, difference=math.inf, note=f"{type(error).__name__}: {text}"))
    return checks
