"""The language-model head for distillation: likeliest tokens, hidden states, KL to a teacher's whole distribution.

`DistillationHead` returns the outputs of `LogprobHead`, and the outputs that a call of `ask` requests. Several targets
per token need only `LogprobHead.target`.

Shape letters: T tokens, t tokens of a chunk, V rows of the vocabulary that this rank holds, D hidden size (a teacher's
may differ), K targets or likeliest tokens of a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan_rl.model.logprobs import LogprobHead, chunked_gradients, scaled_logits, score_chunk, target_scores
from torchtitan_rl.model.sharding import vocabulary_cut

__all__ = ["DistillationHead", "chunked_kl", "chunked_top_k"]

_MAX_ID = 2**31 - 1


def chunked_top_k(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    *,
    top_k: int,
    temperature: float = 1.0,
    chunk_tokens: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`chunked_logprobs` without gradient, and the `top_k` likeliest tokens of each distribution: int64 ids and float32
    log-probabilities, both (T, top_k), best first. Logits are compared in float32; the lower id wins a tie."""
    targets_TK = targets.reshape(len(targets), -1)
    chunks = []
    with torch.no_grad():
        for start in range(0, len(targets_TK), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits_tV = scaled_logits(hidden_TD[rows], weight_VD, temperature)
            tokens, best = _top_k(logits_tV, top_k, vocab_start, group)
            logprobs, entropy, lse = score_chunk(logits_tV, targets_TK[rows], vocab_start, group)
            chunks.append((logprobs, entropy, tokens, best - lse[:, None]))
        logprobs_TK, entropy_T, top_tokens_TK, top_logprobs_TK = map(torch.cat, zip(*chunks))
    return logprobs_TK.view(targets.shape), entropy_T, top_tokens_TK, top_logprobs_TK.float()


def _top_k(logits_tV: torch.Tensor, top_k: int, vocab_start: int, group: dist.ProcessGroup | None):
    """The `top_k` likeliest tokens and their logits in float32, both (t, top_k), best first; the lower id wins a tie.

    One int64 key per logit holds the logit in the upper half and the id in the lower half. No two keys are equal, so
    sorting keys decides every tie. Ranks send each other `top_k` keys per token.
    """
    ids = torch.arange(vocab_start, vocab_start + logits_tV.shape[1], device=logits_tV.device)
    keys = _sortable((logits_tV.float() + 0.0).view(torch.int32)).long()  # + 0.0: -0.0 equals 0.0
    best = keys.bitwise_left_shift_(32).add_(_MAX_ID - ids).topk(min(top_k, logits_tV.shape[1])).values
    if group is not None:
        best = F.pad(best, (0, top_k - best.shape[1]), value=torch.iinfo(torch.int64).min)
        gathered = [torch.empty_like(best) for _ in range(group.size())]
        dist.all_gather(gathered, best, group)
        best = torch.cat(gathered, 1).topk(top_k).values
    return _MAX_ID - (best & (2**32 - 1)), _sortable((best >> 32).int()).view(torch.float32)


def _sortable(bits_of_floats: torch.Tensor) -> torch.Tensor:
    """Maps the int32 bits of floats to int32 in the floats' order; the map is its own inverse."""
    return bits_of_floats ^ ((bits_of_floats >> 31) & _MAX_ID)


class _ChunkedKL(torch.autograd.Function):
    """KL(p || q) = sum p (log p - log q) of a policy p to a teacher q; forward keeps neither's logits.

    With z = h W^T / temperature and p = softmax(z), and q likewise from the teacher's hidden states and head:
    dKL / dz = p (log p - log q - KL). The teacher gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group):
        kls, lses = [], []
        for start in range(0, len(hidden_TD), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = scaled_logits(hidden_TD[rows], weight_VD, temperature)
            teacher = scaled_logits(teacher_hidden_TD[rows], teacher_weight_VD, temperature)
            peaks = torch.stack([logits.amax(-1), teacher.amax(-1)])
            if group is not None:
                dist.all_reduce(peaks, dist.ReduceOp.MAX, group)
            logits.sub_(peaks[0, :, None])
            teacher.sub_(peaks[1, :, None])
            teacher_total = teacher.exp().sum(-1)
            difference = teacher.neg_().add_(logits)
            exp = logits.exp_()
            sums = torch.stack([exp.sum(-1), teacher_total, difference.mul_(exp).sum(-1)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            lse = sums[:2].log()
            kls.append(sums[2] / sums[0] - lse[0] + lse[1])
            lses.append(peaks + lse)
        kl_T = torch.cat(kls)
        ctx.save_for_backward(hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, torch.cat(lses, 1), kl_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return kl_T

    @staticmethod
    def backward(ctx, grad_kl_T):
        hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, (lse_T, teacher_lse_T), kl_T = ctx.saved_tensors

        def grad_logits(rows):
            logp = scaled_logits(hidden_TD[rows], weight_VD, ctx.temperature).sub_(lse_T[rows, None])
            logq = scaled_logits(teacher_hidden_TD[rows], teacher_weight_VD, ctx.temperature)
            grad = logq.sub_(teacher_lse_T[rows, None])
            grad.neg_().add_(logp).sub_(kl_T[rows, None])
            return grad.mul_(logp.exp_()).mul_(grad_kl_T[rows, None])

        return *chunked_gradients(ctx, hidden_TD, weight_VD, kl_T.dtype, grad_logits), None, None, None, None, None


def chunked_kl(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    teacher_hidden_TD: torch.Tensor,
    teacher_weight_VD: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """KL(policy || teacher) over the whole vocabulary at each token, (T,), at least float32.

    Differentiable in `hidden_TD` and `weight_VD`. The two hidden sizes may differ. Both heads have equal rows of
    the vocabulary. With `group`, heads and gradients are this rank's share, as in `chunked_logprobs`.
    """
    return _ChunkedKL.apply(
        hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group
    )


class DistillationHead(LogprobHead):
    """A `LogprobHead` that returns `top_tokens` and `top_logprobs`, `hidden` and `teacher_kl` on request.

    `teacher_weight_VD` is this rank's slice of a teacher's head, neither a parameter nor in a state dict; None before
    `hold_teacher`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LogprobHead.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.teacher_weight_VD: torch.Tensor | None = None

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
            held, size = self.teacher_weight_VD, teacher_hidden_TD.shape[-1]
            if held is None or held.shape[1] != size:
                having = "no teacher's head is held" if held is None else f"the teacher's head held has {held.shape[1]}"
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
        softmax = {"temperature": temperature, "group": group}
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
            said = dict(zip(names, scores))
        else:
            said = target_scores(
                hidden_TD, weight_VD, targets, chunk_tokens=chunk_tokens, vocab_start=vocab_start, **softmax
            )
        if hidden:
            said["hidden"] = hidden_TD.detach()
        if teacher_hidden_TD is not None:
            teacher_VD = self.teacher_weight_VD
            said["teacher_kl"] = chunked_kl(
                hidden_TD,
                weight_VD,
                F.pad(teacher_hidden_TD, (0, 0, 0, len(hidden_TD) - len(teacher_hidden_TD))).to(teacher_VD.dtype),
                teacher_VD,
                chunk_tokens=smaller_chunk,
                **softmax,
            )
        return said
