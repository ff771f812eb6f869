"""The trainer's language-model head: log-probabilities, entropies and what a distillation needs, never logits.

`LogprobHead` replaces the language-model head in the model's config, before the model is built. The decoder, FSDP and
TP treat `LogprobHead` like any head, but `LogprobHead` returns per-token log-probabilities instead of logits
(`logprobs.py`). A call of `ask` requests further outputs (`logprobs_distillation.py`); several targets per token need
only `target`.

Shape letters: T tokens, V rows of the vocabulary that this rank holds, D hidden size (a teacher's may differ), K
targets of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear

from torchtitan_rl import adapters
from torchtitan_rl.model.logprobs import target_scores
from torchtitan_rl.model.logprobs_distillation import chunked_kl, chunked_top_k
from torchtitan_rl.model.sharding import vocabulary_cut

__all__ = ["LogprobHead"]

adapters.adapt_torchtitan()

_UNCUT: dict[str, Any] = {"vocab_start": 0, "group": None}  # a head whose whole vocabulary is on this rank


class LogprobHead(Linear):
    """A language-model head that returns per-token numbers, by name, each (1, T, ...): `policy_logprobs` of the targets
    and `entropy`, after `ask` also `top_tokens` and `top_logprobs`, `hidden`, `teacher_kl`.

    `teacher_weight_VD` is this rank's slice of a teacher's head, neither a parameter nor in a state dict; None before
    `hold_teacher`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_bytes: int = 128 * 2**20
        """Memory that the float32 logits of one chunk may take; a chunk has at least one token."""
        kernels: bool = True
        """Kernels compute the log-probabilities where the device has some; False: torch's operators everywhere."""
        float32: bool = False
        """`ModelConfig.float32_head`."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_bytes, self.kernels, self.float32 = config.chunk_bytes, config.kernels, config.float32
        self.teacher_weight_VD: torch.Tensor | None = None
        self._score: Callable[..., dict[str, torch.Tensor]] | None = None

    def target(self, targets: torch.Tensor, temperature: float) -> None:
        """Sets the targets (T,) or (T, K) of the next forward; the decoder's forward has no argument for targets."""
        self._score = partial(
            target_scores, targets=targets, temperature=temperature, kernels=self.kernels, float32_head=self.float32
        )

    def hold_teacher(self, weight: torch.Tensor, rank: int, size: int) -> None:
        """Keeps this tensor-parallel rank's slice of a teacher's whole head, (vocabulary, D), in the head's dtype.

        Raises RuntimeError when the vocabularies differ.
        """
        if len(weight) != self.out_features:
            raise RuntimeError(
                f"teacher: has a vocabulary of {len(weight)} where this model has {self.out_features}; "
                "use a teacher with the same tokenizer"
            )
        start, rows = vocabulary_cut(self.out_features, rank, size)
        self.teacher_weight_VD = torch.empty_like(weight[start : start + rows], device=self.weight.device)
        self.teacher_weight_VD.copy_(weight[start : start + rows])

    def ask(
        self,
        targets: torch.Tensor,
        temperature: float,
        *,
        top_k: int = 0,
        hidden: bool = False,
        teacher_hidden_TD: torch.Tensor | None = None,
    ) -> None:
        """Sets the targets of the next forward, as `target` does, and requests further outputs.

        `top_k` (without gradient) requests the likeliest tokens, `hidden` the head's input, `teacher_hidden_TD` the KL
        to the teacher of `hold_teacher`. Raises RuntimeError when no teacher's head is held, or when the held head has
        another hidden size than `teacher_hidden_TD`.
        """
        if teacher_hidden_TD is not None:
            teacher_VD, size = self.teacher_weight_VD, teacher_hidden_TD.shape[-1]
            if teacher_VD is None or teacher_VD.shape[1] != size:
                having = (
                    "no teacher's head is held"
                    if teacher_VD is None
                    else f"the teacher's head held has {teacher_VD.shape[1]}"
                )
                raise RuntimeError(
                    f"teacher_hidden: {size} numbers per token, but {having}; copy the head of the "
                    "teacher they are from with PolicyVersions.copy_head first"
                )
        self._score = partial(
            self._scores,
            targets=targets,
            temperature=temperature,
            top_k=top_k,
            hidden=hidden,
            teacher_hidden_TD=teacher_hidden_TD,
        )

    def _scores(
        self,
        hidden_TD,
        weight_VD,
        *,
        targets,
        temperature,
        top_k,
        hidden,
        teacher_hidden_TD,
        chunk_tokens,
        vocab_start,
        group,
    ) -> dict[str, torch.Tensor]:
        softmax = {"temperature": temperature, "group": group, "float32_head": self.float32}
        smaller_chunk = max(1, chunk_tokens // 3)  # top-k and KL take up to five buffers, log-probabilities two
        if top_k:
            names = "policy_logprobs", "entropy", "top_tokens", "top_logprobs"
            scores = chunked_top_k(
                hidden_TD,
                weight_VD,
                targets,
                top_k=top_k,
                chunk_tokens=smaller_chunk,
                vocab_start=vocab_start,
                **softmax,
            )
            outputs = dict(zip(names, scores))
        else:
            outputs = target_scores(
                hidden_TD,
                weight_VD,
                targets,
                chunk_tokens=chunk_tokens,
                vocab_start=vocab_start,
                kernels=self.kernels,
                **softmax,
            )
        if hidden:
            outputs["hidden"] = hidden_TD.detach()
        if teacher_hidden_TD is not None:
            teacher_VD = self.teacher_weight_VD
            outputs["teacher_kl"] = chunked_kl(
                hidden_TD,
                weight_VD,
                F.pad(teacher_hidden_TD, (0, 0, 0, len(hidden_TD) - len(teacher_hidden_TD))).to(teacher_VD.dtype),
                teacher_VD,
                chunk_tokens=smaller_chunk,
                **softmax,
            )
        return outputs

    def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self._score is not None, "LogprobHead.target() must be called before the model"
        score, self._score = self._score, None
        weight, rows, shard = self.weight, self.out_features, _UNCUT
        if isinstance(weight, DTensor):
            input, weight, rows, shard = self._shard(input)
        chunk_tokens = max(1, self.chunk_bytes // (4 * rows))  # equal on every rank: every chunk has collectives
        outputs = score(input.flatten(0, 1), weight, chunk_tokens=chunk_tokens, **shard)
        return {name: rows_T[None] for name, rows_T in outputs.items()}

    def _shard(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, dict[str, Any]]:
        """This rank's input and rows of the head, the most rows that a rank has, and which rows these are."""
        group = self.weight.device_mesh.get_group()
        vocab_start, num_rows = vocabulary_cut(self.out_features, group.rank(), group.size())
        weight = self.weight.to_local()
        assert len(weight) == num_rows > 0, "not DTensor's cut of the vocabulary"
        assert isinstance(input, DTensor), "a sharded head is given what its plan made of the input"
        most = -(-self.out_features // group.size())
        return input.to_local(grad_placements=[Partial()]), weight, most, {"vocab_start": vocab_start, "group": group}
