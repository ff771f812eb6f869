"""The head's Triton kernels, run by Triton's interpreter on a CPU, against float64 and against torch's operators.

Triton decides when it is imported whether it interprets. So this file is run as a program, with TRITON_INTERPRET=1:
`python test_logprob_kernels.py compare`, `... passes` or `... rank RANK STORE`.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

ROOT = Path(__file__).parents[3]
CASES = {  # tokens, vocabulary, targets of a token, temperature, scale and offset of the logits
    "smaller than a block": (7, 37, 1, 1.0, 1.0, 0.0),
    "one block": (3, 4096, 3, 0.7, 1.0, 0.0),
    "a block and one": (3, 4097, 1, 1.3, 1.0, 0.0),
    "Qwen3's vocabulary": (2, 151_936, 3, 0.7, 1.0, 0.0),
    "one token in the vocabulary": (2, 1, 1, 0.5, 1.0, 0.0),
    "large logits": (5, 10_007, 3, 1.0, 60.0, 0.0),
    "small temperature": (5, 10_007, 1, 0.05, 1.0, 0.0),
    "negative logits": (5, 10_007, 1, 2.0, 1.0, -300.0),
    "rising logits": (2, 9000, 1, 1.0, 0.0, 0.0),
}
DTYPES = ("float32", "bfloat16", "float16")


def start(*args):
    """This file as a program, importing this working tree."""
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "passive"},
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
def differences():
    return answers([start("compare")], timeout=240)[0]


@pytest.mark.parametrize("reference", ["float64", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(differences, case, reference):
    errors = differences[case]
    for name, error in errors[reference].items():
        # Sums over a vocabulary cancel, and large logits leave float32 few digits: torch's operators show how many.
        assert error <= max(1e-6, 2 * errors["torch against float64"][name]), (name, errors)


def test_large_logits_cost_the_gradient_no_digits(differences):
    errors = differences["large logits"]
    for name in ("logprobs: grad_hidden", "logprobs: grad_weight"):
        assert errors["float64"][name] <= 2e-7 < errors["torch against float64"][name]


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(differences, dtype):
    errors = differences[dtype]
    cut = 2 if dtype == "bfloat16" else 1  # Triton's interpreter cuts bits off where a GPU rounds to bfloat16
    for name in ("logprobs", "entropy"):  # in float32 from the same logits
        assert errors["torch"][name] <= 1e-6, (name, errors)
    for name in ("grad_hidden", "grad_weight"):
        assert errors["float64"][name] <= 1.01 * cut * errors["torch against float64"][name], (name, errors)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_head_in_float32_rounds_no_logit(differences, dtype):
    errors, rounded = differences[f"{dtype}, float32 head"], differences[dtype]["float64"]
    assert max(errors["logprobs"], errors["entropy"]) <= 1e-6, errors
    for name in ("grad_hidden", "grad_weight"):  # rounded to the dtype once, as without
        assert errors[name] <= 1.5 * rounded[name], (name, errors, rounded)


def test_what_needs_no_gradient_or_has_none_stays_so(differences):
    assert differences["edges"] == {
        "frozen hidden": True,
        "frozen weight": True,
        "masked tokens": True,
        "no gradient": True,
        "not a number": True,
        "second backward": True,
    }


def test_logits_are_read_four_times_and_written_twice_in_one_chunk_and_three_times_in_any_further_one():
    (counts,) = answers([start("passes")], timeout=120)
    for dtype, share in (("float32", 1), ("bfloat16", 0.5)):
        # Passes are in bytes of all logits in float32: bfloat16's are half as long.
        for num_chunks, writes in (("1", 2), ("2", 2.5)):
            kernels, whole = counts[dtype][num_chunks]["kernels"], counts[dtype][num_chunks]["with matrix products"]
            assert kernels == pytest.approx({"reads": 2 * share, "writes": share}, rel=5e-3)
            assert whole == pytest.approx({"reads": 4 * share, "writes": writes * share}, rel=5e-3)
        plain = counts[dtype]["1"]["torch's operators"]
        assert plain["reads"] + plain["writes"] > 20  # or the count would miss what torch does


def test_vocabulary_parallel_results_are_those_of_the_whole_vocabulary(tmp_path):
    for errors in answers([start("rank", rank, tmp_path / "store") for rank in range(2)], timeout=120):
        for name, error in errors["float64"].items():
            assert error <= max(1e-6, 2 * errors["torch against float64"][name]), (name, errors)


def _inputs(num_tokens, vocab_size, num_targets, scale, offset, dtype):
    import torch

    generator = torch.Generator().manual_seed(vocab_size)
    dim = 4
    hidden = torch.randn(num_tokens, dim, generator=generator) * scale
    weight = torch.randn(vocab_size, dim, generator=generator)
    if offset:
        hidden[:, 0], weight[:, 0] = 1.0, offset
    if not scale:  # each block has a new largest logit
        hidden[:, 0], weight[:, 0] = 1.0, torch.linspace(-50, 50, vocab_size)
    targets = torch.randint(vocab_size, (num_tokens, num_targets), generator=generator)
    targets[0] = targets[0, 0]  # several equal targets
    targets[-1, -1] = vocab_size - 1
    upstream = torch.randn(targets.shape, generator=generator), torch.randn(num_tokens, generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets, upstream


def _reference(hidden, weight, targets, temperature, upstream):
    """Outputs and gradients in float64 from the logits as the product gives them; `upstream` has None for an output
    that the loss leaves out."""
    import torch

    logits = (hidden.detach() @ weight.detach().T).double().requires_grad_()
    logp = (logits / temperature).log_softmax(-1)
    outputs = [logp.gather(1, targets), -(logp.exp() * logp).sum(-1)]
    pairs = [(output, grad.double()) for output, grad in zip(outputs, upstream) if grad is not None]
    (grad,) = torch.autograd.grad([output for output, _ in pairs], [logits], [grad for _, grad in pairs])
    return [*outputs, grad @ weight.detach().double(), grad.T @ hidden.detach().double()]


def _results(hidden, weight, targets, temperature, upstream, **options):
    import torch

    from torchtitan_rl.model.logprobs import chunked_logprobs

    outputs = chunked_logprobs(hidden, weight, targets, temperature=temperature, **options)
    pairs = [(output, grad) for output, grad in zip(outputs, upstream) if grad is not None]
    return [
        *outputs,
        *torch.autograd.grad([output for output, _ in pairs], [hidden, weight], [grad for _, grad in pairs]),
    ]


def _errors(ours, expected) -> dict[str, float]:
    """Largest difference of values, relative to values above 1; norm of the difference of gradients, relative."""
    ours, expected = ([tensor.detach().double() for tensor in tensors] for tensors in (ours, expected))
    values = {
        name: float(((a - b).abs() / b.abs().clamp(min=1)).max())
        for name, a, b in zip(("logprobs", "entropy"), ours, expected)
    }
    gradients = {
        name: float((a - b).norm() / b.norm().clamp(min=1e-3))
        for name, a, b in zip(("grad_hidden", "grad_weight"), ours[2:], expected[2:])
    }
    return values | gradients


def _compare() -> dict:
    import torch

    found = {}
    for case, (num_tokens, vocab_size, num_targets, temperature, scale, offset) in CASES.items():
        *inputs, upstream = _inputs(num_tokens, vocab_size, num_targets, scale, offset, torch.float32)
        errors = found[case] = {"float64": {}, "torch": {}, "torch against float64": {}}
        # The loss's gradient in both outputs, in the log-probabilities alone and in the entropies alone.
        for kept, gradients in {
            "both": upstream,
            "logprobs": (upstream[0], None),
            "entropy": (None, upstream[1]),
        }.items():
            ours = _results(*inputs, temperature, gradients, chunk_tokens=2)
            plain = _results(*inputs, temperature, gradients, chunk_tokens=2, kernels=False)
            exact = _reference(*inputs, temperature, gradients)
            for reference, results, expected in (
                ("float64", ours, exact),
                ("torch", ours, plain),
                ("torch against float64", plain, exact),
            ):
                errors[reference] |= {f"{kept}: {name}": x for name, x in _errors(results, expected).items()}
    for dtype in DTYPES[1:]:
        *inputs, upstream = _inputs(6, 5003, 3, 1.0, 0.0, getattr(torch, dtype))
        ours = _results(*inputs, 0.7, upstream, chunk_tokens=6)
        plain = _results(*inputs, 0.7, upstream, chunk_tokens=6, kernels=False)
        exact = _reference(*inputs, 0.7, upstream)
        found[dtype] = {
            "float64": _errors(ours, exact),
            "torch": _errors(ours, plain),
            "torch against float64": _errors(plain, exact),
        }
        # The logits of a head in float32 are those of the same numbers in float32.
        ours = _results(*inputs, 0.7, upstream, chunk_tokens=6, float32_head=True)
        widened = [tensor.detach().float().requires_grad_() for tensor in inputs[:2]]
        exact = _reference(*widened, *inputs[2:], 0.7, upstream)
        found[f"{dtype}, float32 head"] = _errors(ours, exact)
    return found | {"edges": _edges()}


def _edges() -> dict[str, bool]:
    import torch

    from torchtitan_rl.model.logprobs import chunked_logprobs

    hidden, weight, targets, upstream = _inputs(6, 300, 1, 1.0, 0.0, torch.float32)
    _, _, grad_hidden, grad_weight = _results(hidden, weight, targets, 0.7, upstream, chunk_tokens=4)
    frozen = {}
    for name, leaf, expected in (("weight", hidden, grad_hidden), ("hidden", weight, grad_weight)):
        inputs = [leaf if leaf is tensor else tensor.detach() for tensor in (hidden, weight)]
        outputs = chunked_logprobs(*inputs, targets, temperature=0.7, chunk_tokens=4)
        (grad,) = torch.autograd.grad(outputs, leaf, list(upstream))
        frozen[f"frozen {name}"] = torch.equal(grad, expected)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    masked = _results(hidden, weight, targets, 0.7, (mask[:, None], mask), chunk_tokens=4)[2]
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(hidden, weight, targets[:, 0], chunk_tokens=4)
    outputs = chunked_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=6)
    once, twice = (torch.autograd.grad(outputs, hidden, list(upstream), retain_graph=True)[0] for _ in range(2))
    broken = torch.full_like(hidden[:1].detach(), float("nan"))
    return frozen | {
        "masked tokens": bool((masked[mask == 0] == 0).all() and (masked[mask == 1] != 0).any()),
        "no gradient": logprobs.shape == (6,) and not logprobs.requires_grad,
        "second backward": torch.equal(once, twice),
        "not a number": bool(chunked_logprobs(broken, weight, targets[:1], chunk_tokens=4)[0].isnan().all()),
    }


def _passes() -> dict:
    """Bytes that forward and backward read and write of tensors as large as a chunk of logits, in units of all logits
    in float32, by dtype and number of chunks. Kernels count every number they load and store."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    num_tokens, vocab_size = 64, 4999
    numbers = num_tokens * vocab_size
    kernels = {"reads": 0.0, "writes": 0.0}
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def counted_load(ptrs, mask, *args):
        kernels["reads"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth / 32 / numbers
        return load(ptrs, mask, *args)

    def counted_store(ptrs, value, mask, *args):
        kernels["writes"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth / 32 / numbers
        return store(ptrs, value, mask, *args)

    interpreter_builder.create_masked_load, interpreter_builder.create_masked_store = counted_load, counted_store
    run = GridExecutor.__call__

    def without_modes(*args, **kwargs):
        with _disable_current_modes():  # the interpreter copies a kernel's arguments
            return run(*args, **kwargs)

    GridExecutor.__call__ = without_modes

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.reads = self.writes = 0.0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            outputs = func(*args, **(kwargs or {}))
            aliases = [returned.alias_info for returned in func._schema.returns]
            if any(alias is not None and not alias.is_write for alias in aliases) or "empty" in func.name():
                return outputs  # a view, or memory that nobody has written
            self.reads += sum(map(self.passes, torch.utils._pytree.tree_leaves(args)))
            self.writes += sum(map(self.passes, torch.utils._pytree.tree_leaves(outputs)))
            return outputs

        def passes(self, value) -> float:
            if not isinstance(value, torch.Tensor) or value.numel() < numbers // 2:
                return 0.0
            return value.numel() * value.element_size() / 4 / numbers

    found = {}
    for dtype in DTYPES[:2]:
        *inputs, upstream = _inputs(num_tokens, vocab_size, 1, 1.0, 0.0, getattr(torch, dtype))
        found[dtype] = {}
        for num_chunks in (1, 2):
            kernels.update(reads=0.0, writes=0.0)
            with Operators() as products:
                _results(*inputs, 0.7, upstream, chunk_tokens=num_tokens // num_chunks)
            with Operators() as operators:
                _results(*inputs, 0.7, upstream, chunk_tokens=num_tokens // num_chunks, kernels=False)
            found[dtype][num_chunks] = {
                "kernels": dict(kernels),
                "with matrix products": {
                    "reads": kernels["reads"] + products.reads,
                    "writes": kernels["writes"] + products.writes,
                },
                "torch's operators": {"reads": operators.reads, "writes": operators.writes},
            }
    return found


def _rank(rank: int, store: str) -> dict:
    """Two ranks, of which the second has fewer rows, and the whole vocabulary on one by torch's operators, each against
    float64."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    hidden, weight, targets, upstream = _inputs(5, 5003, 3, 3.0, 0.0, torch.float32)
    weight.data[4000] *= 20  # the ranks' largest logits differ by much
    whole = _results(hidden, weight, targets, 0.7, upstream, chunk_tokens=2, kernels=False)
    rows = slice(0, 2502) if rank == 0 else slice(2502, 5003)
    cut = weight.detach()[rows].clone().requires_grad_()
    options = {"chunk_tokens": 2, "vocab_start": rows.start, "group": dist.group.WORLD}
    ours = _results(hidden, cut, targets, 0.7, upstream, **options)
    dist.all_reduce(ours[2])  # each rank's share of the gradient of hidden states
    dist.destroy_process_group()
    exact = _reference(hidden, weight, targets, 0.7, upstream)
    whole, exact = ([*results[:3], results[3][rows]] for results in (whole, exact))
    return {"float64": _errors(ours, exact), "torch against float64": _errors(whole, exact)}


if __name__ == "__main__":
    from torchtitan_rl import platform

    platform.has_logprob_kernels = lambda hidden: True  # the interpreter runs them on a CPU
    mode, *arguments = sys.argv[1:]
    if mode == "rank":
        print(json.dumps(_rank(int(arguments[0]), arguments[1])))
    else:
        print(json.dumps({"compare": _compare, "passes": _passes}[mode]()))
