"""Hugging Face directories: reading weights into a model and writing a model out, through torchtitan's adapter."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem

from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model import lora
from torchtitan_rl.model.files import assets_dir, weight_files
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.sharding import whole
from torchtitan_rl.weights.saved_state import naming_failures

__all__ = ["SCORE", "load_hf_weights", "full_state", "weights_misfit", "write_hf_dir"]

SCORE = "score.weight"
"""The head of a sequence classifier in a Hugging Face directory: a row of `dim` numbers for each label."""


def load_hf_weights(model, adapter, directory: Path, shape: DecoderShape, *, head: bool = True) -> None:
    """Reads safetensors into a (possibly sharded) model; each rank reads only its part. Adapters stay unchanged.

    `shape` is the model's. `head=False` is for a model with a value head, which is the head of a sequence classifier
    with one label (`score.weight`) where the directory has one, and stays unchanged elsewhere. Raises ValueError for a
    directory whose config.json is of another family or of a model that the family does not compute, and for tensors of
    other names or sizes than the model's. Raises RuntimeError for a file that cannot be read to its end.
    """
    reader = _WeightReader(directory)
    if misfit := _misfit(adapter, reader, directory, shape, head=head):
        raise ValueError(misfit)
    state_dict, entries = model.state_dict(), reader.read_metadata().state_dict_metadata
    state = adapter.to_hf(lora.base_state(state_dict))
    if not head:
        state.pop("lm_head.weight", None)
        if SCORE in entries:
            state[SCORE] = state_dict["lm_head.weight"]
    if shape.optional_weights:
        state = {name: of for name, of in state.items() if name in entries or not name.endswith(shape.optional_weights)}
    with naming_failures(directory):
        dcp.load(state, storage_reader=reader)
    value_head = state.pop(SCORE, None)
    read = adapter.from_hf(state)
    if not head:
        read.pop("lm_head.weight", None)  # torchtitan's adapter of Qwen3.5 makes a missing head of the embedding
    if value_head is not None:
        read["lm_head.weight"] = value_head
    model.load_state_dict(state_dict | read)


def weights_misfit(config: ModelConfig, *, head: bool = True, score: bool = False) -> str:
    """Why the tensors in the directory of a configured model do not fit a model of its sizes; empty when they do.

    Reads the headers of the files alone. `head` as for `load_hf_weights`; `score` refuses a directory without the head
    of a classifier.
    """
    from torchtitan_rl.model.spec import build_spec

    directory = assets_dir(config)
    spec = build_spec(config)
    adapter = spec.state_dict_adapter(spec.model, str(directory))
    reader = _WeightReader(directory)
    return _misfit(adapter, reader, directory, resolve_shape(config), head=head, score=score)


class _WeightFiles(FileSystem):
    """Lists the files of a directory that are the model."""

    def ls(self, path: str | os.PathLike) -> list[str]:
        return [str(file) for file in weight_files(Path(path))]


class _WeightReader(HuggingFaceStorageReader):
    """torch's reader of a directory's safetensors, for those of `weight_files` alone: torch's takes all there are."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.fs = _WeightFiles()


def _misfit(
    adapter, reader: HuggingFaceStorageReader, directory: Path, shape: DecoderShape, *, head: bool, score: bool = False
) -> str:
    """Why the files have not the tensors of the adapter's model in their sizes, or have others; empty when they fit. A
    head that is tied or not read, tables of the rotary embedding and parts that the family leaves out may be there."""
    try:
        if (directory / "config.json").exists():
            shape.require_described_by(directory / "config.json", head=head)
        weight_files(directory)
    except ValueError as error:
        return str(error)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError, SafetensorError, struct.error) as error:
        return f"weights={str(directory)!r}: a safetensors file has no header ({error}); copy the files again"
    with torch.device("meta"):  # the whole model: a rank's own state has its own experts alone
        whole = adapter.model_config.build()
    state = adapter.to_hf(lora.base_state(whole.state_dict()))
    if not head:
        state.pop("lm_head.weight", None)
    sizes: dict[str, tuple[int, ...]] = {name: tuple(getattr(entry, "size", ())) for name, entry in entries.items()}
    if not head and SCORE in sizes and sizes[SCORE] != (1, shape.dim):
        return (
            f"weights={str(directory)!r}: {SCORE} is {list(sizes[SCORE])}, a head of {sizes[SCORE][0]} labels; give "
            f"the directory of a classifier with one label, whose head is {[1, shape.dim]}"
        )
    if score and SCORE not in sizes:
        return (
            f"weights={str(directory)!r}: has no {SCORE}, the head of a sequence classifier; give the directory of an "
            "AutoModelForSequenceClassification with one label"
        )
    computed = [re.escape(name).replace(r"\{\}", r"\d+") for name, ours in adapter.from_hf_map.items() if ours is None]
    left_out = [re.escape(beginning) + ".*" for beginning in shape.other_weights]
    tied = not head or shape.tie_embeddings
    other_heads = (["lm_head\\.weight"] if tied else []) + ([] if head else [re.escape(SCORE)])
    unread = re.compile("|".join([*other_heads, *computed, *left_out]))
    optional = tuple(filter(None, [shape.optional_weights]))
    wrong = [f"{name} is missing" for name in state if name not in sizes and not name.endswith(optional)]
    wrong += [
        f"{name} is {list(sizes[name])}, not {list(tensor.shape)}"
        for name, tensor in state.items()
        if name in sizes and sizes[name] != tuple(tensor.shape)
    ]
    extra = [name for name in sizes if name not in state and not unread.fullmatch(name)]
    wrong += [f"{name} is of no part of the model" for name in extra]
    if not wrong:
        return ""
    shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return (
        f"weights={str(directory)!r}: {len(wrong)} tensors do not fit the model: {shown}; give the directory of a "
        "model of these sizes"
    )


def full_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of a model's state, on the CPU; a collective call when the model is sharded."""
    return {name: whole(tensor).cpu() for name, tensor in state.items()}


def write_hf_dir(state: dict[str, torch.Tensor], adapter, directory: Path, *, classifier: bool = False) -> None:
    """Adds `model.safetensors` with Hugging Face's names to a directory made by `write_model_dir`. `classifier`: the
    head is that of a sequence classifier."""
    tensors, places = adapter.to_hf(state), set()
    if classifier:
        tensors.pop("lm_head.weight", None)
        tensors[SCORE] = state["lm_head.weight"]
    for name, tensor in tensors.items():
        dense = tensor.contiguous()
        # safetensors refuses two names of one tensor, such as a tied head.
        tensors[name] = dense.clone() if dense.data_ptr() in places else dense
        places.add(dense.data_ptr())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
