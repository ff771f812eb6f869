"""What one trainer rank holds and does, without actors: model, optimizer, weights out, checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_rl import platform
from torchtitan_rl.actors.config import TrainerConfig
from torchtitan_rl.model.config import ModelConfig, assets_dir, has_weights, write_model_dir
from torchtitan_rl.model.spec import build_spec, shape_of, training_spec
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.types import Accumulated, LossFunction, Microbatch, OptimParams, OptimStepOutput
from torchtitan_rl.weights import checkpoint, hf, packing
from torchtitan_rl.weights.store import SharedBuffers, WeightStore

from torchtitan.components.optimizer import default_adamw  # noqa: E402  (platform.adapt_torchtitan ran in model.spec)
from torchtitan.config import TORCH_DTYPE_MAP  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts  # noqa: E402
from torchtitan.models.utils import validate_converter_order  # noqa: E402
from torchtitan.tools.utils import set_default_dtype  # noqa: E402

__all__ = ["TrainerRank"]

logger = logging.getLogger(__name__)

_ACTIVATION_CHECKPOINT = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}


def _plain(name: str) -> str:
    """A parameter's or buffer's name as state dicts have it, without activation checkpointing's wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "")


class TrainerRank:
    """A torchtitan model, sharded by its canonical plan, and its optimizer. The process group exists already."""

    def __init__(
        self, config: TrainerConfig, model: ModelConfig, seed: int, device: torch.device, store_name: str, dump_dir: str,
    ):
        self.config, self.model_config, self.seed, self.device, self.dump_dir = config, model, seed, device, dump_dir
        self.store, self.buffers = WeightStore(store_name), SharedBuffers()
        self.policy_version = 0
        self._train_timeout_set = False
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        set_determinism(self.parallel_dims, device, config.debug, distinct_seed_mesh_dims=[])
        self._build_model()

    def _build_model(self) -> None:
        config = self.config
        spec = build_spec(self.model_config)
        self.shape = shape_of(spec.model)
        validate_converter_order(config.converters)
        for converter in config.converters:
            spec.model = converter.build().convert(spec.model)
        attention = platform.attention_backend() if config.attention == "auto" else config.attention
        self.spec = training_spec(
            spec, SimpleNamespace(parallelism=config.parallelism), attention=attention,
            chunk_tokens=config.logprob_chunk_tokens)
        dtype = TORCH_DTYPE_MAP[config.training.dtype]
        with torch.device("meta"), set_default_dtype(dtype):
            model = self.spec.model.build()
        ac_class = _ACTIVATION_CHECKPOINT[config.activation_checkpoint]
        model = self.spec.parallelize_fn(
            model, parallel_dims=self.parallel_dims, training=config.training, parallelism=config.parallelism,
            compile_config=config.compile, ac_config=ac_class() if ac_class else None, dump_folder=self.dump_dir)
        platform.adapt_parallel_model(model)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_weights()
        self.model = model.train()
        self.adapter = self.spec.state_dict_adapter(self.spec.model, str(assets_dir(self.model_config)))
        if has_weights(self.model_config):
            hf.load_hf_weights(model, self.adapter, assets_dir(self.model_config))
        else:
            self._init_like_one_rank(dtype)
        optimizer = config.optimizer
        self.optimizers = default_adamw(
            lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay)
        self.optimizers.implementation = optimizer.implementation
        self.optimizers = self.optimizers.build(model_parts=[model])
        for register in (self.spec.post_optimizer_build_fn, config.post_optimizer_build_fn):
            if register is not None:
                register(self.optimizers, [model], self.parallel_dims)
        logger.info("model: %s, %d parameters, attention %s, degrees %s",
                    self.shape, self.shape.num_parameters, attention, self.parallel_dims)

    def _init_like_one_rank(self, dtype: torch.dtype) -> None:
        """Random weights that do not depend on the layout: each rank draws the whole model and keeps its part."""
        torch.manual_seed(self.seed)
        with set_default_dtype(dtype):
            whole = self.spec.model.build()
        whole.init_weights()
        held = self.model.state_dict()
        self.model.load_state_dict({
            name: distribute_tensor(tensor.to(self.device), held[name].device_mesh, held[name].placements)
            if isinstance(held[name], DTensor) else tensor.to(self.device)
            for name, tensor in whole.state_dict().items()
        })

    def accumulate(
        self, batches: list[Microbatch], loss_fn: LossFunction | None, *, temperature: float, loss_weight: float = 1.0,
    ) -> Accumulated:
        """Adds this rank's microbatches to the gradient, in order; without a loss only scores them."""
        # Sequence parallelism cuts the packed tokens into one equal part per TP rank.
        return accumulate_gradients(
            self.model, batches, loss_fn, self.device, temperature=temperature, loss_weight=loss_weight,
            multiple_of=self.parallel_dims.tp)

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips, steps, zeroes the gradient. A gradient that is not finite is dropped and the step skipped."""
        given = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        defaults = {"max_grad_norm": self.config.training.max_norm} | {
            name: getattr(self.config.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")}
        params = OptimParams(**{name: defaults[name] if value is None else value for name, value in given.items()})
        norm, stepped = clip_and_step(
            list(self.model.parameters()), self.optimizers, params, max_grad_norm=params.max_grad_norm,
            grad_scale=grad_scale, expert_parallel=self.parallel_dims.ep_enabled)
        self.policy_version += stepped
        if not self._train_timeout_set:  # the first step compiles and allocates; later ones get the tighter bound
            if self.device.type == "cuda":  # gloo's timeout cannot be changed; there the controller's deadline bounds it
                set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
            self._train_timeout_set = True
        return OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=self.policy_version, skipped=not stepped)

    def reset_optimizer(self) -> None:
        """Forgets moments and step count, for a new phase with another loss."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Publishes this policy version to the store, parameters cast to `dtype`. Returns the version."""
        version = self.policy_version
        state = self.model.state_dict()
        # The fused QKV weight shows as wq, wk and wv, so what is not a buffer by name is a parameter.
        buffers = {_plain(name) for name, _ in self.model.named_buffers()}
        manifest = packing.plan(
            version, ((name, t.shape, t.dtype, name not in buffers) for name, t in state.items()), dtype)
        publisher = dist.get_rank() == 0
        handle, payload = "", None
        if publisher and transport == "shared_memory":
            handle, payload = self.buffers.take(version, manifest.nbytes)
        elif publisher:
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
        for name, tensor in state.items():
            whole = tensor.detach()
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()  # collective: every rank takes part, rank 0 keeps the result
            if publisher:
                packing.write(payload, manifest, name, whole)
        if publisher:
            await self.store.publish(manifest, payload, handle=handle, verify=verify)
        return version

    def discard_weights(self, version: int) -> None:
        """Lets a published version's memory be used again."""
        self.buffers.release(version)

    def save_checkpoint(self, path: str) -> None:
        """Parameters and optimizer through torch's distributed checkpoint."""
        dcp.save({"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict()},
                 checkpoint_id=str(checkpoint.model_dir(Path(path))))

    def load_checkpoint(self, path: str, policy_version: int, optimizer: bool) -> None:
        """The reverse, into this layout whatever the layout that saved it."""
        state = {"model": self.model.state_dict()}
        if optimizer:
            state["optimizer"] = self.optimizers.state_dict()
        dcp.load(state, checkpoint_id=str(checkpoint.model_dir(Path(path))))
        self.model.load_state_dict(state["model"])
        if optimizer:
            self.optimizers.load_state_dict(state["optimizer"])
        self.policy_version = policy_version

    def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory: config, tokenizer, safetensors."""
        state = hf.full_state(self.model)
        if dist.get_rank() == 0:
            write_model_dir(Path(path), self.shape, assets_dir(self.model_config), eos=eos, pad=pad)
            hf.write_hf_dir(state, self.adapter, Path(path))

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters, for tests and debugging of small models."""
        return hf.full_state(self.model)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients, for tests and debugging of small models."""
        grads = {_plain(name): p.grad for name, p in self.model.named_parameters()}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
