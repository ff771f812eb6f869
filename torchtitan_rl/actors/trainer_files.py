"""A trainer rank's files: checkpoints, Hugging Face directories, adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_rl.actors import optimizer_state
from torchtitan_rl.actors.checkpoint_writer import CheckpointWriter, load_random_states
from torchtitan_rl.actors.operations import VALUE_ROLES
from torchtitan_rl.model import lora
from torchtitan_rl.model.files import assets_dir, has_weights, write_model_dir
from torchtitan_rl.model.module_state import fused_state
from torchtitan_rl.model.sharding import plain_name, whole
from torchtitan_rl.weights import checkpoint, hf, peft
from torchtitan_rl.weights.saved_state import load_state, saved_names

__all__ = ["TrainerFiles"]


class TrainerFiles:
    """One rank's part in reading and writing files; every rank of the mesh makes the same calls."""

    def __init__(self, rank: Any):
        """`rank` is the `TrainerRank` whose model and optimizer are read and written."""
        self.rank = rank
        self._writer = CheckpointWriter()

    def init_model(self, path: str) -> None:
        """Loads weights from a Hugging Face directory or a checkpoint, sets the policy version to 0, resets the
        optimizer and drops the accumulated gradient."""
        rank = self.rank
        if (Path(path) / "config.json").exists():
            head = rank.role not in VALUE_ROLES
            adapter = rank.spec.state_dict_adapter(rank.spec.model, path)
            hf.load_hf_weights(rank.model, adapter, Path(path), rank.shape, head=head)
            if rank.config.lora is not None:  # an export has the old adapters merged in: start with B = 0
                lora.draw_adapters(rank.model, rank.seed)
            rank.model.zero_grad()
            rank.policy_version = 0
            rank.exchange.base_has_changed()
        else:
            self.load_weights(path, 0)
        if rank.optimizers is not None:
            rank.clear_moments()

    def stage_checkpoint(self, path: str) -> None:
        """Copies parameters (with LoRA the adapters only), optimizer and random states to host memory, from where a
        thread writes them below `path` as torch's distributed checkpoint. An accumulated gradient is not saved, and
        stays. Raises RuntimeError while the checkpoint before is still being written."""
        record, optimizers = self._lora_record(), self.rank.optimizers
        if dist.get_rank() == 0:
            checkpoint.write_lora(Path(path), record)
        state = {"model": self._trained(fused_state(self.rank.model))}
        if optimizers is not None:
            state["optimizer"] = optimizer_state.complete_state(optimizers)
        self._writer.stage(state, Path(path))

    def checkpoint_written(self) -> dict[str, list] | None:
        """Path below the checkpoint of each file that this rank wrote -> [bytes, xxh3]; None while the rank is still
        writing. Raises what writing raised."""
        return self._writer.written()

    def remove_checkpoint(self, path: str) -> None:
        """Deletes what this rank's host has of a checkpoint."""
        checkpoint.remove(Path(path))

    def load_checkpoint(self, path: str, policy_version: int) -> None:
        """Loads parameters and optimizer of a checkpoint, which another layout may have saved, and drops the
        accumulated gradient.

        Raises ValueError for adapters of another LoRA config or of another base model, and for a file that names code.
        """
        self._load(path, policy_version, optimizers=self.rank.optimizers)

    def load_weights(self, path: str, policy_version: int) -> None:
        """`load_checkpoint` without the optimizer, which stays unchanged."""
        self._load(path, policy_version, optimizers=None)

    def _load(self, path: str, policy_version: int, *, optimizers) -> None:
        checkpoint.require_lora(Path(path), self._lora_record())
        directory, model = checkpoint.model_dir(Path(path)), self.rank.model
        names = saved_names(directory)
        split = any(name.endswith(".wq.weight") for name in names)  # format 1, or a model without fused weights
        state = {"model": self._trained(model.state_dict() if split else fused_state(model))}
        if optimizers is not None:
            state["optimizer"] = optimizer_state.of_stepped(optimizer_state.complete_state(optimizers), names)
            # How this run steps, not how the saved one did: every step sets the other settings of the groups.
            implementation = {n: v for n, v in state["optimizer"].items() if n.endswith((".fused", ".foreach"))}
        load_state(state, directory)
        model.load_state_dict(state["model"], strict=self.rank.config.lora is None)
        if optimizers is not None:
            optimizers.load_state_dict(state["optimizer"] | implementation)
            load_random_states(directory)
        model.zero_grad()  # a gradient of the weights before says nothing about these
        self.rank.policy_version = policy_version

    def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        """Writes a Hugging Face directory: config, tokenizer, safetensors, adapters merged in. A model with a value
        head becomes a sequence classifier with one label, as `AutoModelForSequenceClassification` reads it."""
        rank, classifier = self.rank, self.rank.role in VALUE_ROLES
        state, adapters = rank.exchange.base_and_adapters()
        if dist.get_rank():
            for tensor in state.values():
                whole(tensor)  # collective: every rank takes part, rank 0 uses the result
            return
        merged = {name: lora.merge(name, whole(tensor).cpu(), adapters) for name, tensor in state.items()}
        tokenizer_dir = assets_dir(rank.model_config)
        dtype = rank.config.training.dtype
        write_model_dir(Path(path), rank.shape, tokenizer_dir, eos=eos, pad=pad, dtype=dtype, classifier=classifier)
        hf.write_hf_dir(merged, self._export_adapter(), Path(path), classifier=classifier)

    def save_adapter(self, path: str) -> None:
        """Writes the adapters as a directory that PEFT loads. Raises ValueError without LoRA."""
        rank, config = self.rank, self.rank.exchange.lora
        if config is None:
            raise ValueError("trainer.lora=None: there are no adapters to save; use save_hf_model")
        _, adapters = rank.exchange.base_and_adapters()
        if dist.get_rank() == 0:
            base = str(assets_dir(rank.model_config)) if has_weights(rank.model_config) else None
            peft.write_peft_dir(adapters, self._export_adapter(), config, Path(path), base=base)

    def _export_adapter(self) -> Any:
        """torchtitan's adapter for the names of what this package writes: of no other directory, whose config.json may
        be of a model that has this one as a part."""
        return self.rank.spec.state_dict_adapter(self.rank.spec.model, None)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters, base weights and adapters apart, for tests and debugging of small models."""
        return hf.full_state(self.rank.model.state_dict())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Whole accumulated gradients, in host memory, for tests and debugging of small models."""
        gradients = {plain_name(name): p.grad for name, p in self.rank.model.named_parameters()}
        return {name: None if gradient is None else _whole(gradient) for name, gradient in gradients.items()}

    def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Whole first and second moments of Adam, in host memory, of the parameters that have taken a step; for small
        models."""
        state = {parameter: of for optimizer in self.rank.optimizers for parameter, of in optimizer.state.items()}
        return {
            plain_name(name): (_whole(state[parameter]["exp_avg"]), _whole(state[parameter]["exp_avg_sq"]))
            for name, parameter in self.rank.model.named_parameters()
            if parameter in state
        }

    def _trained(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the model's state a checkpoint holds: with LoRA the adapters, else everything."""
        return state if self.rank.config.lora is None else lora.adapter_state(state)

    def _lora_record(self) -> dict | None:
        """LoRA config and base fingerprint, which `require_lora` compares; None without LoRA. A collective call."""
        config = self.rank.config.lora
        if config is None:
            return None
        return dataclasses.asdict(config) | {"base_xxh3": self.rank.exchange.base_fingerprint()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a tensor that is cut over ranks all of it, which every rank has to ask for."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)
