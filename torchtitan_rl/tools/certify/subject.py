"""The model that is certified: its sizes, its weights as transformers wrote them, and the tokens it is asked about."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan_rl.config.meshes import AdamWConfig, GeneratorConfig, LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import ControllerConfig, RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.files import BUILTIN_ASSETS, write_model_dir
from torchtitan_rl.tools.certify.reference_model import ReferenceModel
from torchtitan_rl.types import Datum

__all__ = ["CALL_S", "EOS", "PAD", "Subject"]

CALL_S = 300.0
"""Seconds that one call of the trainer or the engine may take."""
EOS, PAD = 1, 0
_LENGTHS = (3, 17, 40, 9, 33, 64)


@dataclass(kw_only=True, slots=True)
class Subject:
    """A small model in a directory of its own, and transformers' model with the same weights."""

    shape: DecoderShape
    """What trainer and engine build."""
    directory: Path
    """config.json and tokenizer, and the safetensors that transformers wrote."""
    engine_directory: Path
    """config.json as the family writes it, and tokenizer."""
    reference: ReferenceModel
    documents: list[list[int]]
    """Sequences of token ids, of several lengths."""
    long_documents: list[list[int]]
    """Sequences that end at and beyond the original context of a scaled rotary embedding, and near the context's
    end."""

    @classmethod
    def of(cls, shape: DecoderShape, hf: dict[str, Any], scratch: Path) -> Subject:
        """Draws the weights of the model that `hf` describes. `shape` is the family's reading of `hf`."""
        directory, engine_directory = scratch / "transformers", scratch / "engine"
        write_model_dir(directory, shape, BUILTIN_ASSETS["chars"], eos=EOS, pad=PAD)
        write_model_dir(engine_directory, shape, BUILTIN_ASSETS["chars"], eos=EOS, pad=PAD)
        draw = random.Random(0)

        def document(length: int) -> list[int]:
            return [draw.randrange(3, shape.vocab_size) for _ in range(length)]

        original = getattr(getattr(shape, "rope_scaling", None), "original_max_seq_len", 0)
        lengths = [*([original, original + 1, 2 * original] if original else []), shape.max_seq_len - 1]
        return cls(
            shape=shape,
            directory=directory,
            engine_directory=engine_directory,
            reference=ReferenceModel.drawn(hf, directory),
            documents=[document(length) for length in _LENGTHS],
            long_documents=[document(length) for length in lengths],
        )

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(assets=str(self.directory), shape=self.shape, pretrained=True)

    def trainer(self, *, shard: int = 1, tensor: int = 1, lora: LoRAConfig | None = None) -> TrainerConfig:
        """A trainer in float32 that packs all documents into one microbatch."""
        config = TrainerConfig(optimizer=AdamWConfig(lr=1e-2), lora=lora, num_threads=0 if shard * tensor == 1 else 1)
        config.training.seq_len = self.shape.max_seq_len
        config.parallelism.data_parallel_shard_degree = shard
        config.parallelism.tensor_parallel_degree = tensor
        return config

    def run_config(
        self, *, model_impl: Literal["torchtitan", "vllm"] = "torchtitan", lora: LoRAConfig | None = None
    ) -> RunConfig:
        """A run with one trainer and one engine, in float32."""
        generator = GeneratorConfig(dtype="float32", max_model_len=self.shape.max_seq_len, max_num_seqs=64)
        return RunConfig(
            name="certify",
            task=None,
            model=self.model,
            trainer=self.trainer(lora=lora),
            generator=dataclasses.replace(generator, kv_cache_gib=0.25, model_impl=model_impl),
            controller=ControllerConfig(start_timeout_s=CALL_S, call_timeout_s=CALL_S, sample_timeout_s=CALL_S),
        )

    def data(self, documents: list[list[int]]) -> list[Datum]:
        """The documents for the trainer, each token with a weight: some positive, some negative."""
        return [
            Datum(
                tokens=torch.tensor(tokens[:-1]),
                target_tokens=torch.tensor(tokens[1:]),
                loss_inputs={"loss_mask": torch.ones(len(tokens) - 1), "token_weights": weights_T},
            )
            for tokens, weights_T in zip(documents, self.weights(documents))
        ]

    def weights(self, documents: list[list[int]]) -> list[torch.Tensor]:
        """The weight of every token but the first."""
        return [torch.linspace(-1, 1.5, len(tokens) - 1) for tokens in documents]
