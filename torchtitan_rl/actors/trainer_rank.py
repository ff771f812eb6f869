"""What one trainer rank holds and does, without actors: model, optimizer, weights out, checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims  # noqa: E402  (platform.adapt_torchtitan ran in actors.build)
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts  # noqa: E402

from torchtitan_rl.actors.build import build_model, build_optimizers, load_whole
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model import lora
from torchtitan_rl.model.files import assets_dir, has_weights, write_model_dir
from torchtitan_rl.model.residency import Part, device_bytes, gradient_tensors, model_tensors, optimizer_tensors
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.types import Accumulated, LossFunction, Microbatch, OptimParams, OptimStepOutput
from torchtitan_rl.weights import checkpoint, hf, layout, peft
from torchtitan_rl.weights.store import SharedBuffers, WeightStore

__all__ = ["TrainerRank"]

logger = logging.getLogger(__name__)

COPY, HEAD = "copy", "head"  # the store's keys of weights on their way from one trainer role to another
TRAINED_ROLES = ("policy", "critic")


def _plain(name: str) -> str:
    """A parameter's or buffer's name as state dicts have it, without activation checkpointing's wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "")


class TrainerRank:
    """A torchtitan model, sharded by its canonical plan, and its optimizer. The process group exists already.

    A `critic` has a value head; `reference` and `teacher` are only scored and have no optimizer.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        role: str,
        seed: int,
        device: torch.device,
        store: WeightStore,
        dump_dir: str,
    ):
        self.config, self.model_config, self.role, self.seed, self.device = config, model, role, seed, device
        self.parts = {"model": Part(), "optimizer": Part(), "gradients": Part()}
        self.store, self.buffers = store, SharedBuffers()
        self.policy_version = 0
        self._base_fingerprint: str | None = None
        self._train_timeout_set = False
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        set_determinism(self.parallel_dims, device, config.debug, distinct_seed_mesh_dims=[])
        built = build_model(
            config, model, role=role, seed=seed, parallel_dims=self.parallel_dims, device=device, dump_dir=dump_dir
        )
        self.model, self.shape, self.adapter = built.model, built.shape, built.adapter
        tensor_parallel = self.parallel_dims.get_optional_mesh("tp")
        self._tensor_parallel_rank = 0 if tensor_parallel is None else tensor_parallel.get_local_rank()
        self.optimizers = None
        if role in TRAINED_ROLES:
            self.optimizers = build_optimizers(config, built.spec, self.model, self.parallel_dims)
        logger.info("model: %s, %d parameters, degrees %s", self.shape, self.shape.num_parameters, self.parallel_dims)

    def forward(
        self, batches: list[Microbatch], temperature: float, top_k: int = 0, hidden: bool = False
    ) -> Accumulated:
        """Log-probabilities (a critic: values) of this rank's microbatches, in order, and what else is asked for."""
        self._require("forward", "model")
        result = self._accumulate(batches, None, temperature, top_k=top_k, hidden=hidden)
        if self._tensor_parallel_rank:  # dispatch hears the first rank only, and hidden states are large
            result.rows = {}
        return result

    def forward_backward(
        self, batches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> Accumulated:
        """Adds this rank's microbatches to the gradient, in order."""
        self._require("forward_backward", "model", "gradients")
        return self._accumulate(batches, loss_fn, temperature, loss_weight=loss_weight)

    def _accumulate(self, batches, loss_fn: LossFunction | None, temperature: float, **changes) -> Accumulated:
        # Sequence parallelism cuts the packed tokens into one equal part per TP rank.
        return accumulate_gradients(
            self.model,
            batches,
            loss_fn,
            self.device,
            temperature=temperature,
            multiple_of=self.parallel_dims.tp,
            **changes,
        )

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips, steps, zeroes the gradient. A gradient that is not finite is dropped and the step skipped."""
        self._require("optim_step", "model", "optimizer", "gradients")
        given = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        defaults = {"max_grad_norm": self.config.training.max_norm} | {
            name: getattr(self.config.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")
        }
        params = OptimParams(**{name: defaults[name] if value is None else value for name, value in given.items()})
        norm, stepped = clip_and_step(
            list(self.model.parameters()),
            self.optimizers,
            params,
            max_grad_norm=params.max_grad_norm,
            grad_scale=grad_scale,
            expert_parallel=self.parallel_dims.ep_enabled,
        )
        self.policy_version += stepped
        if not self._train_timeout_set:  # the first step compiles and allocates; later ones get the tighter bound
            if (
                self.device.type == "cuda"
            ):  # gloo's timeout cannot be changed; there the controller's deadline bounds it
                set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
            self._train_timeout_set = True
        return OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=self.policy_version, skipped=not stepped)

    def reset_optimizer(self) -> None:
        """Forgets moments and step count, for a new phase with another loss."""
        self._require("reset_optimizer", "optimizer", "gradients")
        for optimizer in self.optimizers:
            optimizer.state.clear()

    # Residency: what is on the device.

    def offload(self, parts: list[str]) -> None:
        """Moves parts (of model, optimizer, gradients) to host memory; what is there already stays."""
        for name in parts:
            self.parts[name].offload(self._tensors(name))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that another process on this device can have what was freed

    def onload(self, parts: list[str]) -> None:
        """Brings parts back."""
        for name in parts:
            self.parts[name].onload()

    def residency(self) -> dict[str, int]:
        """Bytes of each part that are on the device."""
        return {name: device_bytes(self._tensors(name)) for name in self.parts}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        if part == "model":
            return model_tensors(self.model)
        if part == "gradients":
            return gradient_tensors(self.model)
        return optimizer_tensors(self.optimizers) if self.optimizers is not None else []

    def _require(self, operation: str, *parts: str) -> None:
        """Raises RuntimeError unless these parts are on the device, ValueError if the role lacks one."""
        if self.optimizers is None and "gradients" in parts:
            raise ValueError(f"role={self.role!r}: is only scored; {operation} needs one of {', '.join(TRAINED_ROLES)}")
        missing = [name for name in parts if not self.parts[name].on_device]
        if missing:
            raise RuntimeError(
                f"{self.role}.{operation}: {' and '.join(missing)} offloaded; call it through a TrainingClient, "
                "which brings back what an operation needs"
            )

    # Weights in and out.

    def init_model(self, path: str) -> None:
        """Replaces the weights by those of a Hugging Face directory or a complete checkpoint; forgets the optimizer."""
        self._require("init_model", "model", "optimizer")
        if (Path(path) / "config.json").exists():
            hf.load_hf_weights(self.model, self.adapter, Path(path), head=self.role != "critic")
            if self.config.lora is not None:  # what was learned is in those weights, if it was saved from here
                lora.draw_adapters(self.model, self.seed)
            self.policy_version, self._base_fingerprint = 0, None
        else:
            self.load_checkpoint(path, 0, optimizer=False)
        if self.optimizers is not None:
            self.reset_optimizer()

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Publishes this policy version to the store, parameters cast to `dtype`. Returns the version."""
        await self._publish(self.policy_version, dtype, transport, verify)
        return self.policy_version

    async def push_copy(self, transport: str) -> None:
        """Publishes the weights as they are, for another trainer role to pull; the generators' dtype has no say."""
        await self._publish(COPY, None, transport, True)

    async def pull_copy(self) -> None:
        """Takes over the weights that another role has published by `push_copy`, whatever the two layouts; a critic all
        but the head."""
        self._require("pull_copy", "model")
        manifest, payload = await self.store.fetch(COPY, verify=True)
        own = {"lm_head.weight"} if self.role == "critic" else set()
        held = {name: (tuple(t.shape), t.dtype) for name, t in self.model.state_dict().items() if name not in own}
        offered = {name: entry for name, entry in manifest.entries.items() if name not in own}
        if difference := layout.explain_difference(offered, held):
            raise RuntimeError(f"{self.role}.pull_copy: the published weights do not fit this model: {difference}")
        load_whole(self.model, {n: t for n, t in layout.read(payload, manifest).items() if n not in own}, self.device)

    async def push_head(self, transport: str) -> None:
        """Publishes the head's weight as it is, for another trainer role to hold as its teacher's."""
        if self.role == "critic":
            raise ValueError("role='critic': has a value head, which no policy can learn from; copy another role's")
        await self._publish(HEAD, None, transport, True, only="lm_head.weight")

    async def pull_head(self) -> None:
        """Holds what another role published by `push_head`, each tensor-parallel rank its slice of the vocabulary."""
        if self.role == "critic":
            raise ValueError("role='critic': has no vocabulary to compare with a teacher's; give it to the policy")
        self._require("pull_head", "model")
        manifest, payload = await self.store.fetch(HEAD, verify=True)
        weight = layout.read(payload, manifest)["lm_head.weight"]
        compute_dtype = getattr(torch, self.config.training.mixed_precision_param)  # as the policy's own head is used
        head: Any = self.model.lm_head
        head.hold_teacher(weight.to(compute_dtype), self._tensor_parallel_rank, self.parallel_dims.tp)

    async def _publish(
        self, version: int | str, dtype: torch.dtype | None, transport: str, verify: bool, *, only: str | None = None
    ) -> None:
        self._require("push_weights", "model")
        state, adapters = self._base_and_adapters()
        if only is not None:
            state = {only: state[only]}
        # The fused QKV weight shows as wq, wk and wv, so what is not a buffer by name is a parameter.
        buffers = {_plain(name) for name, _ in self.model.named_buffers()}
        manifest = layout.plan(
            version, ((name, t.shape, t.dtype, name not in buffers) for name, t in state.items()), dtype
        )
        publisher = dist.get_rank() == 0
        handle, payload = "", None
        if publisher and transport == "shared_memory":
            handle, payload = self.buffers.take(version, manifest.nbytes)
        elif publisher:
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
        for name, tensor in state.items():
            whole = lora.whole(tensor)  # collective: every rank takes part, rank 0 keeps the result
            if publisher:
                layout.write(payload, manifest, name, lora.merge(name, whole, adapters))
        if publisher:
            if self.device.type == "cuda":  # once, for all copies
                torch.cuda.current_stream().synchronize()
            await self.store.publish(manifest, payload, handle=handle, verify=verify)

    def discard_weights(self, version: int | str) -> None:
        """Lets a published version's memory be used again."""
        self.buffers.release(version)

    def _base_and_adapters(self) -> tuple[dict[str, torch.Tensor], lora.Adapters]:
        """The state of the model as it is without LoRA, and what `lora.merge` adds to it; a collective call."""
        state, config = self.model.state_dict(), self.config.lora
        if config is None:
            return state, {}
        return lora.base_state(state), lora.whole_adapters(state, self.shape.n_kv_heads, config)

    def _trained_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: with LoRA the adapters, else every parameter."""
        state = self.model.state_dict()
        return state if self.config.lora is None else lora.adapter_state(state)

    def _lora_record(self) -> dict | None:
        """What a checkpoint of adapters must agree with; a collective call."""
        if self.config.lora is None:
            return None
        if self._base_fingerprint is None:  # the base is frozen: once is enough
            self._base_fingerprint = lora.base_fingerprint(self.model.state_dict())
        return dataclasses.asdict(self.config.lora) | {"base_xxh3": self._base_fingerprint}

    def save_checkpoint(self, path: str) -> None:
        """What trains and its optimizer, through torch's distributed checkpoint."""
        self._require("save_checkpoint", "model", "optimizer")
        record = self._lora_record()
        if dist.get_rank() == 0:
            checkpoint.write_lora(Path(path), record)
        state = {"model": self._trained_state()}
        if self.optimizers is not None:
            fresh = not any(optimizer.state for optimizer in self.optimizers)
            state["optimizer"] = self.optimizers.state_dict()
            if fresh:  # torch has made the state by a step of size zero, which must not count as one
                for tensor in (s["step"] for optimizer in self.optimizers for s in optimizer.state.values()):
                    tensor.zero_()
        dcp.save(state, checkpoint_id=str(checkpoint.model_dir(Path(path))))

    def load_checkpoint(self, path: str, policy_version: int, optimizer: bool) -> None:
        """The reverse, into this layout whatever the layout that saved it.

        Raises ValueError for adapters of another kind or of another base model.
        """
        self._require("load_checkpoint", "model", *(["optimizer", "gradients"] if optimizer else []))
        checkpoint.require_lora(Path(path), self._lora_record())
        state = {"model": self._trained_state()}
        if optimizer:
            state["optimizer"] = self.optimizers.state_dict()
        dcp.load(state, checkpoint_id=str(checkpoint.model_dir(Path(path))))
        self.model.load_state_dict(state["model"], strict=self.config.lora is None)
        if optimizer:
            self.optimizers.load_state_dict(state["optimizer"])
        self.policy_version = policy_version

    def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory: config, tokenizer, safetensors; adapters are merged in."""
        if self.role == "critic":
            raise ValueError(
                "role='critic': has a value head, which Qwen3's Hugging Face form lacks; use save_checkpoint"
            )
        self._require("save_hf_model", "model")
        state, adapters = self._base_and_adapters()
        state = hf.full_state(state)
        if dist.get_rank() == 0:
            state = {name: lora.merge(name, tensor, adapters) for name, tensor in state.items()}
            write_model_dir(Path(path), self.shape, assets_dir(self.model_config), eos=eos, pad=pad)
            hf.write_hf_dir(state, self.adapter, Path(path))

    def save_adapter(self, path: str) -> None:
        """Writes the adapters as a directory that PEFT loads. Raises ValueError without LoRA."""
        config = self.config.lora
        if config is None:
            raise ValueError("trainer.lora=None: there are no adapters to save; use save_hf_model")
        self._require("save_adapter", "model")
        _, adapters = self._base_and_adapters()
        if dist.get_rank() == 0:
            base = str(assets_dir(self.model_config)) if has_weights(self.model_config) else None
            peft.write_peft_dir(adapters, self.adapter, config, Path(path), base=base)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters, adapters beside their base, for tests and debugging of small models."""
        return hf.full_state(self.model.state_dict())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients, in host memory, for tests and debugging of small models."""
        grads = {_plain(name): p.grad for name, p in self.model.named_parameters()}
        whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
        return {n: None if g is None else g.cpu() for n, g in whole.items()}
