"""Log-probabilities and entropy of target tokens straight from hidden states, a chunk of tokens at a time.

The language-model head is replaced (in the model's config, before it is built) by `LogprobHead`: called
where the head would be, so FSDP and TP treat it as they treat the head, it returns per-token
log-probabilities instead of logits. At most `chunk_bytes` of float32 logits exist at once (and a second buffer of
that size). Under tensor parallelism each rank holds a slice of the vocabulary and the softmax is vocabulary-parallel:
two all-reduces, of one and of three numbers per token, instead of a gather of the logits.

Shape letters: T tokens, V rows of the vocabulary that this rank holds, D hidden size (a teacher's may differ), K
targets or likeliest tokens of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common.linear import Linear

__all__ = ["LogprobHead", "chunked_kl", "chunked_logprobs", "chunked_top_k"]


def _logits(hidden, weight, temperature):
    """Scaled logits of a chunk, at least float32: one of the two buffers of that size that a chunk takes."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden @ weight.T).to(dtype).div_(temperature)


def _slots(targets_TK, weight, vocab_start):
    """Each target's row of this shard (any row where it has none), and whether the target is in the shard."""
    local = targets_TK - vocab_start
    return local.clamp(0, weight.shape[0] - 1), (local >= 0) & (local < weight.shape[0])


def _scores(hidden_TD, weight_VD, targets_TK, temperature, chunk_tokens, vocab_start, group, top_k=0):
    """(log-probabilities (T, K), entropies (T,), logarithms of the softmax's denominator (T,), the `top_k` likeliest
    tokens and their log-probabilities, both (T, top_k))."""
    chunks = []
    for start in range(0, len(targets_TK), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits = _logits(hidden_TD[rows], weight_VD, temperature)
        slots, mine = _slots(targets_TK[rows], weight_VD, vocab_start)
        tokens, best = _top_k(logits, top_k, vocab_start, group)
        peak = logits.amax(-1)
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        logits.sub_(peak[:, None])
        chosen = logits.gather(1, slots) * mine
        exp = logits.exp()
        sums = torch.cat([torch.stack([exp.sum(-1), exp.mul_(logits).sum(-1)]), chosen.T])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums[0], sums[1], sums[2:].T
        lse = total.log()
        chunks.append((chosen - lse[:, None], lse - weighted / total, peak + lse, tokens, best - (peak + lse)[:, None]))
    return tuple(map(torch.cat, zip(*chunks)))


def _top_k(logits, top_k, vocab_start, group):
    """The `top_k` likeliest tokens and their logits in float32, both (t, top_k), best first, of equals the lower id.

    One integer per logit holds both, the logit above the id, so that an order without equals is all there is to find
    and to send: `top_k` integers per token and rank.
    """
    if not top_k:
        return logits.new_empty(len(logits), 0, dtype=torch.int64), logits.new_empty(len(logits), 0)
    ids = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    keys = _sortable((logits.float() + 0.0).view(torch.int32)).long()  # + 0.0: -0.0 equals 0.0
    best = keys.bitwise_left_shift_(32).add_(_MAX_ID - ids).topk(min(top_k, logits.shape[1])).values
    if group is not None:
        best = F.pad(best, (0, top_k - best.shape[1]), value=torch.iinfo(torch.int64).min)
        gathered = [torch.empty_like(best) for _ in range(group.size())]
        dist.all_gather(gathered, best, group)
        best = torch.cat(gathered, 1).topk(top_k).values
    return _MAX_ID - (best & (2**32 - 1)), _sortable((best >> 32).int()).view(torch.float32)


_MAX_ID = 2**31 - 1


def _sortable(bits_of_floats: torch.Tensor) -> torch.Tensor:
    """Int32 in the order of the floats that have these bits, and the way back."""
    return bits_of_floats ^ ((bits_of_floats >> 31) & _MAX_ID)


def _gradients(ctx, hidden_TD, weight_VD, dtype, grad_logits: Callable[[slice], torch.Tensor]):
    """Gradients of hidden states and head, chunk by chunk; `grad_logits(rows)` is that of the scaled logits."""
    # A frozen head (LoRA) wants no gradient: it would cost a third of this pass and the size of the head.
    wants_hidden, wants_weight = ctx.needs_input_grad[:2]
    grad_hidden = torch.empty_like(hidden_TD) if wants_hidden else None
    grad_weight = torch.zeros(weight_VD.shape, dtype=dtype, device=weight_VD.device) if wants_weight else None
    for start in range(0, len(hidden_TD), ctx.chunk_tokens):
        rows = slice(start, start + ctx.chunk_tokens)
        hidden = hidden_TD[rows]
        grad = grad_logits(rows).div_(ctx.temperature).to(hidden.dtype)
        if wants_hidden:
            torch.mm(grad, weight_VD, out=grad_hidden[rows])
        if wants_weight and grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.T, hidden)
        elif wants_weight:  # bfloat16 products, summed over chunks in float32
            grad_weight += grad.T @ hidden
    return grad_hidden, grad_weight.to(weight_VD.dtype) if wants_weight else None


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward keeps no logits; backward recomputes them chunk by chunk.

    With z = h W^T / temperature, p = softmax(z), H = -sum p log p:
    d logp[y] / dz = onehot(y) - p,  dH / dz = -p (log p + H).
    Of several targets y_k with gradients g_k: scatter_add(g_k at y_k) - (sum g_k) p.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_TK, temperature, chunk_tokens, vocab_start, group):
        logprobs_TK, entropy_T, lse_T, *_ = _scores(
            hidden_TD, weight_VD, targets_TK, temperature, chunk_tokens, vocab_start, group
        )
        ctx.save_for_backward(hidden_TD, weight_VD, targets_TK, lse_T, entropy_T)
        ctx.temperature, ctx.chunk_tokens, ctx.vocab_start = temperature, chunk_tokens, vocab_start
        ctx.set_materialize_grads(False)  # a loss without an entropy term gives None, known without asking the device
        return logprobs_TK, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_TK, grad_entropy_T):
        hidden_TD, weight_VD, targets_TK, lse_T, entropy_T = ctx.saved_tensors
        if grad_logprobs_TK is None:
            grad_logprobs_TK = torch.zeros_like(lse_T)[:, None].expand(targets_TK.shape)

        def grad_logits(rows):
            grad_logprobs = grad_logprobs_TK[rows]
            total = grad_logprobs.sum(-1)
            grad = _logits(hidden_TD[rows], weight_VD, ctx.temperature).sub_(lse_T[rows, None])
            if grad_entropy_T is None:
                grad.exp_().mul_(-total[:, None])
            else:
                p = grad.exp()
                grad.add_(entropy_T[rows, None]).mul_(-grad_entropy_T[rows, None]).sub_(total[:, None]).mul_(p)
            slots, mine = _slots(targets_TK[rows], weight_VD, ctx.vocab_start)
            return grad.scatter_add_(1, slots, grad_logprobs * mine)

        return *_gradients(ctx, hidden_TD, weight_VD, lse_T.dtype, grad_logits), None, None, None, None, None


class _ChunkedKL(torch.autograd.Function):
    """KL(p || q) = sum p (log p - log q) of a policy p to a teacher q, without keeping logits of either.

    With z = h W^T / temperature and p = softmax(z), q likewise from the teacher's hidden states and head:
    dKL / dz = p (log p - log q - KL). The teacher gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group):
        kls, lses = [], []
        for start in range(0, len(hidden_TD), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden_TD[rows], weight_VD, temperature)
            teacher = _logits(teacher_hidden_TD[rows], teacher_weight_VD, temperature)
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
            logp = _logits(hidden_TD[rows], weight_VD, ctx.temperature).sub_(lse_T[rows, None])
            grad = _logits(teacher_hidden_TD[rows], teacher_weight_VD, ctx.temperature).sub_(teacher_lse_T[rows, None])
            grad.neg_().add_(logp).sub_(kl_T[rows, None])
            return grad.mul_(logp.exp_()).mul_(grad_kl_T[rows, None])

        return *_gradients(ctx, hidden_TD, weight_VD, kl_T.dtype, grad_logits), None, None, None, None, None


def chunked_logprobs(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, (T,) or (T, K) as the targets are, and entropy of each distribution, (T,), at
    least float32.

    Differentiable in `hidden_TD` and `weight_VD`. With `group`, `weight_VD` is this rank's rows of the
    vocabulary starting at `vocab_start`; results are then equal on all ranks of the group, and the
    gradient of `hidden_TD` is this rank's share (their sum is the whole).
    """
    logprobs_TK, entropy_T = _ChunkedLogprobs.apply(
        hidden_TD, weight_VD, targets.reshape(len(targets), -1), temperature, chunk_tokens, vocab_start, group
    )
    return logprobs_TK.view(targets.shape), entropy_T


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
    log-probabilities, both (T, top_k), best first. Logits are compared in float32; of equal ones the lower id is first.
    """
    with torch.no_grad():
        logprobs_TK, entropy_T, _, top_tokens_TK, top_logprobs_TK = _scores(
            hidden_TD,
            weight_VD,
            targets.reshape(len(targets), -1),
            temperature,
            chunk_tokens,
            vocab_start,
            group,
            top_k,
        )
    return logprobs_TK.view(targets.shape), entropy_T, top_tokens_TK, top_logprobs_TK.float()


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

    Differentiable in `hidden_TD` and `weight_VD`. The two hidden sizes may differ; the two heads have the same rows of
    the vocabulary, with `group` this rank's, and gradients are then as in `chunked_logprobs`.
    """
    return _ChunkedKL.apply(
        hidden_TD, weight_VD, teacher_hidden_TD, teacher_weight_VD, temperature, chunk_tokens, group
    )


def vocabulary_cut(vocab_size: int, rank: int, size: int) -> tuple[int, int]:
    """(first row, number of rows) of a rank's slice, by DTensor's rule: the last rank may have fewer than others."""
    rows = -(-vocab_size // size)
    return rows * rank, min(rows, vocab_size - rows * rank)


@dataclass(kw_only=True, slots=True)
class _Asked:
    """What the next call of the head is to say."""

    targets: torch.Tensor
    temperature: float
    top_k: int
    hidden: bool
    teacher_hidden_TD: torch.Tensor | None


class LogprobHead(Linear):
    """A language-model head that returns per-token numbers, by name, of what `target` said: each (1, T, ...).

    `policy_logprobs` and `entropy` always; `top_tokens` and `top_logprobs`, `hidden` and `teacher_kl` where asked for.
    `teacher_weight_VD` is this rank's slice of a teacher's head, no parameter and in no state dict; None: none is held.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk_bytes: int = 128 * 2**20
        """Memory that the float32 logits of one chunk may take; a chunk has at least one token."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk_bytes = config.chunk_bytes
        self.teacher_weight_VD: torch.Tensor | None = None
        self._asked: _Asked | None = None

    def target(
        self,
        targets: torch.Tensor,
        temperature: float,
        *,
        top_k: int = 0,
        hidden: bool = False,
        teacher_hidden_TD: torch.Tensor | None = None,
    ) -> None:
        """Says what the next call scores, (T,) or (T, K); the decoder's forward has no argument for it.

        `top_k` (without gradient) asks for the likeliest tokens, `hidden` for the head's own input, `teacher_hidden_TD`
        for the KL to the teacher whose head `hold_teacher` has brought. Raises RuntimeError when none of that size was.
        """
        if teacher_hidden_TD is not None:
            held, size = self.teacher_weight_VD, teacher_hidden_TD.shape[-1]
            if held is None or held.shape[1] != size:
                having = "no teacher's head is held" if held is None else f"the teacher's head held has {held.shape[1]}"
                raise RuntimeError(
                    f"teacher_hidden: {size} numbers per token, but {having}; copy the head of the "
                    "teacher they are from with PolicyVersions.copy_head first"
                )
        self._asked = _Asked(
            targets=targets, temperature=temperature, top_k=top_k, hidden=hidden, teacher_hidden_TD=teacher_hidden_TD
        )

    def hold_teacher(self, weight: torch.Tensor, rank: int, size: int) -> None:
        """Keeps this tensor-parallel rank's slice of a teacher's whole head, (vocabulary, D), in its dtype.

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

    def forward(self, input: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self._asked is not None, "LogprobHead.target() must be called before the model"
        asked, self._asked = self._asked, None
        weight, group, vocab_start, rows = self.weight, None, 0, self.out_features
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group()
            vocab_start, num_rows = vocabulary_cut(self.out_features, group.rank(), group.size())
            rows = -(-self.out_features // group.size())
            weight = weight.to_local()
            assert len(weight) == num_rows > 0, "not DTensor's cut of the vocabulary"
            assert isinstance(input, DTensor), "a sharded head is given what its plan made of the input"
            input = input.to_local(grad_placements=[Partial()])
        chunk_tokens = max(1, self.chunk_bytes // (4 * rows))  # the same on every rank: chunks hold collectives
        smaller_chunk = max(1, chunk_tokens // 3)  # of what takes up to five buffers, not two
        hidden_TD = input.flatten(0, 1)
        softmax: dict[str, Any] = {"temperature": asked.temperature, "group": group}
        if asked.top_k:
            said = dict(
                zip(
                    ("policy_logprobs", "entropy", "top_tokens", "top_logprobs"),
                    chunked_top_k(
                        hidden_TD,
                        weight,
                        asked.targets,
                        top_k=asked.top_k,
                        chunk_tokens=smaller_chunk,
                        vocab_start=vocab_start,
                        **softmax,
                    ),
                )
            )
        else:
            said = dict(
                zip(
                    ("policy_logprobs", "entropy"),
                    chunked_logprobs(
                        hidden_TD, weight, asked.targets, chunk_tokens=chunk_tokens, vocab_start=vocab_start, **softmax
                    ),
                )
            )
        if asked.hidden:
            said["hidden"] = hidden_TD.detach()
        if asked.teacher_hidden_TD is not None:
            said["teacher_kl"] = chunked_kl(
                hidden_TD,
                weight,
                asked.teacher_hidden_TD.to(self.teacher_weight_VD.dtype),
                self.teacher_weight_VD,
                chunk_tokens=smaller_chunk,
                **softmax,
            )
        return {name: rows_T[None] for name, rows_T in said.items()}
