"""The vocabulary cut over real gloo ranks against plain full logits, and the memory that scoring takes.

Run as a program, this file is one rank: `python test_logprobs_parallel.py ranks RANK SIZE STORE` or `... memory`.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = [  # (ranks, vocabulary); a vocabulary that does not divide leaves the last rank fewer rows: 6 and 5, 4, 4 and 3
    (2, 12),
    (2, 11),
    (3, 12),
    (3, 11),
    (3, 10),
]
TOKENS, VOCABULARY = 8192, 151_936


def start(*args):
    """This file as a program, importing this working tree."""
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"},
    )


def answers(processes, timeout):
    """What each process printed last, read as JSON; none is left behind."""
    try:
        results = []
        for process in processes:
            out, errors = process.communicate(timeout=timeout)
            assert process.returncode == 0, errors
            results.append(json.loads(out.splitlines()[-1]))
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """Largest differences from full logits, per rank and case."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    return answers([start("ranks", rank, 3, store) for rank in range(3)], timeout=120)


@pytest.mark.parametrize("size, vocab_size", CASES)
def test_vocabulary_parallel_results_are_those_of_full_logits(differences, size, vocab_size):
    for rank in range(size):
        found = differences[rank][f"{size}x{vocab_size}"]
        assert found.keys() == {
            "logprobs",
            "entropy",
            "grad_hidden",
            "grad_weight",
            "several",
            "kl",
            "several_grad_hidden",
            "several_grad_weight",
            "hidden",
            "top_logprobs",
            "top_tokens_that_differ",
        }
        assert max(found.values()) <= 1e-6, (rank, found)


@pytest.mark.slow
def test_scoring_8k_tokens_at_a_152k_vocabulary_takes_under_a_quarter_of_full_logits():
    (peak,) = answers([start("memory")], timeout=280)
    full = TOKENS * VOCABULARY * 4
    assert 128 * 2**20 < peak < full / 4, f"{peak / 2**20:.0f} MiB of {full / 2**20:.0f}"


def _rank(rank: int, size: int, store: str) -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from torchtitan_rl.model.logprob_head import LogprobHead

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (2, 3)}

    def compare(num_ranks: int, vocab_size: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(vocab_size)
        num_tokens, dim, temperature = 23, 16, 0.7
        hidden = torch.randn(num_tokens, dim, generator=generator)
        weight = 0.3 * torch.randn(vocab_size, dim, generator=generator)
        targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
        upstream = torch.randn(2, num_tokens, generator=generator)

        # 8 tokens a chunk on every rank, whatever its own number of rows.
        head = LogprobHead(
            LogprobHead.Config(
                in_features=dim, out_features=vocab_size, chunk_bytes=8 * 4 * -(-vocab_size // num_ranks), bias=False
            )
        )
        mesh = meshes[num_ranks]
        head.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        cut_hidden = distribute_tensor(hidden[None], mesh, [Replicate()]).requires_grad_()
        head.target(targets, temperature)
        said = head(cut_hidden)
        cut = [said[name][0] for name in ("policy_logprobs", "entropy")]
        torch.autograd.backward(cut, list(upstream))

        full_hidden, full_weight = hidden.requires_grad_(), weight.requires_grad_()
        logp = (full_hidden @ full_weight.T / temperature).log_softmax(-1)
        full = [logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]
        torch.autograd.backward(full, list(upstream))
        return {
            "logprobs": largest(cut[0].detach(), full[0].detach()),
            "entropy": largest(cut[1].detach(), full[1].detach()),
            "grad_hidden": relative(cut_hidden.grad.full_tensor()[0], full_hidden.grad),
            "grad_weight": relative(head.weight.grad.full_tensor(), full_weight.grad),
            **distilled(mesh, head, hidden, weight, targets),
        }

    def distilled(mesh, head, hidden, weight, targets) -> dict[str, float]:
        """Three targets a token and the KL to a teacher of another size, with gradients; the five likeliest tokens of a
        vocabulary in which every row is there twice (the last rank may hold two rows only)."""
        vocab_size, temperature = len(weight), 0.7
        generator = torch.Generator().manual_seed(vocab_size)
        several = torch.stack([targets, (targets + 1) % vocab_size, (targets + 5) % vocab_size], 1)
        teacher_hidden = torch.randn(len(targets), 9, generator=generator)
        teacher = 0.3 * torch.randn(vocab_size, 9, generator=generator)
        upstream = [torch.randn(several.shape, generator=generator), torch.randn(len(targets), generator=generator)]
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()

        head.weight.grad = None
        head.hold_teacher(teacher, mesh.get_local_rank(), mesh.size())
        cut_hidden = distribute_tensor(hidden.detach()[None], mesh, [Replicate()]).requires_grad_()
        head.ask(several, temperature, teacher_hidden_TD=teacher_hidden)
        said = head(cut_hidden)
        cut = [said[name][0] for name in ("policy_logprobs", "teacher_kl")]
        torch.autograd.backward(cut, upstream)
        logp = (hidden @ weight.T / temperature).log_softmax(-1)
        logq = (teacher_hidden @ teacher.T / temperature).log_softmax(-1)
        full = [logp.gather(1, several), (logp.exp() * (logp - logq)).sum(-1)]
        torch.autograd.backward(full, upstream)
        grads = cut_hidden.grad.full_tensor()[0], head.weight.grad.full_tensor()

        doubled = weight.detach()[torch.arange(vocab_size) // 2]
        head.weight = torch.nn.Parameter(distribute_tensor(doubled, mesh, [Shard(0)]))
        head.ask(targets, temperature, top_k=5, hidden=True)
        with torch.no_grad():
            said = head(cut_hidden)
            logits = hidden @ weight[: -(-vocab_size // 2)].T / temperature  # of each row once
            pairs = logits.sort(descending=True, stable=True).indices
            tokens = torch.stack([2 * pairs, 2 * pairs + 1], -1).flatten(1)
            tokens = torch.stack([row[row < vocab_size] for row in tokens])[:, :5]
            logp = (hidden @ doubled.T / temperature).log_softmax(-1)
        return {
            "several": largest(cut[0].detach(), full[0].detach()),
            "kl": relative(cut[1].detach(), full[1].detach()),
            "several_grad_hidden": relative(grads[0], hidden.grad),
            "several_grad_weight": relative(grads[1], weight.grad),
            "hidden": float((said["hidden"][0] - hidden).detach().abs().max()),
            "top_tokens_that_differ": int((said["top_tokens"][0] != tokens).sum()),
            "top_logprobs": largest(said["top_logprobs"][0], logp.gather(1, tokens)),
        }

    def largest(a, b) -> float:
        """Largest difference, relative to numbers above 1: float32 keeps 7 digits, and how the last is rounded depends
        on the processor."""
        return float(((a - b).abs() / b.abs().clamp(min=1)).max())

    def relative(a, b) -> float:
        return float((a - b).norm() / b.norm())

    found = {}
    for num_ranks, vocab_size in CASES:
        if rank < num_ranks:
            found[f"{num_ranks}x{vocab_size}"] = compare(num_ranks, vocab_size)
        dist.barrier()
    dist.destroy_process_group()
    return found


def _memory() -> int:
    """Bytes by which the resident size rises over a forward and a backward, at the default budget."""
    import psutil
    import torch

    from torchtitan_rl.model.logprob_head import LogprobHead

    def score(num_tokens: int, vocab_size: int) -> None:
        head = LogprobHead(LogprobHead.Config(in_features=64, out_features=vocab_size, bias=False))
        torch.nn.init.normal_(head.weight, std=0.1)
        hidden = torch.randn(1, num_tokens, 64, requires_grad=True)
        head.target(torch.randint(vocab_size, (num_tokens,)), 1.0)
        said = head(hidden)
        (said["policy_logprobs"].sum() + said["entropy"].sum()).backward()
        assert torch.isfinite(hidden.grad).all()

    score(8, 16)  # whatever a first call allocates for good
    before = psutil.Process().memory_info().rss
    score(TOKENS, VOCABULARY)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    print(json.dumps(_memory() if what == "memory" else _rank(int(arguments[0]), int(arguments[1]), arguments[2])))
