"""The kernel of a layer's heads, run by Triton's interpreter on a CPU, against torchtitan's own modules.

Triton decides when it is imported whether it interprets. So this file is run as a program, with TRITON_INTERPRET=1.
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
CASES = {  # query heads, key heads, head size, whether pairs are halves, whether heads have norms, bias
    "Qwen3": (4, 2, 16, True, True, False),
    "Qwen2": (4, 2, 16, True, False, True),
    "Llama": (4, 2, 16, False, False, False),
    "pairs with norms": (4, 2, 16, False, True, True),
    "one query head a key": (3, 3, 32, True, True, False),
    "five query heads a key": (5, 1, 32, True, True, False),
    "a size that is no power of two": (6, 2, 24, True, True, False),
}
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def differences():
    process = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "passive"},
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_heads_are_torchtitans(differences, case, dtype):
    # Triton's interpreter cuts bits off where a GPU rounds to bfloat16, and a norm is rounded before it is turned.
    bound = {"float32": 1e-6, "bfloat16": 2.0**-6, "float16": 2.0**-9}[dtype]
    for part, difference in differences[case][dtype].items():
        assert difference <= bound, (part, difference)


def test_values_are_copied(differences):
    assert all(by_dtype["float32"]["value"] == 0 for by_dtype in differences.values())


def compare():
    """Prints, by case, dtype and part, the largest difference between the kernel's heads and torchtitan's, relative to
    the largest number."""
    import torch

    from torchtitan_rl import adapters, platform

    adapters.prepare_vllm(eager=True)
    from torchtitan.models.common.attention import FusedQKVLinear, GQAttention
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

    from torchtitan_rl.engine.kernels import KernelAttention, with_kernels

    platform.has_fused_layers = lambda hidden: True

    class Inner(torch.nn.Module):
        """In the place of vLLM's attention: keeps what it is given."""

        def attention(self, *heads):
            self.heads = heads
            return heads[0]

    def heads_of(case, dtype):
        num_queries, num_keys, head_dim, halves, has_norms, bias = CASES[case]
        dim, rows = 48, (num_queries + 2 * num_keys) * head_dim
        rotation = (CosSinRoPE if halves else ComplexRoPE).Config(dim=head_dim, max_seq_len=64, theta=500.0)
        linear = Linear.Config(in_features=dim, out_features=rows, bias=bias)
        config = GQAttention.Config(
            n_heads=num_queries,
            n_kv_heads=num_keys,
            dim=dim,
            head_dim=head_dim,
            qkv_linear=FusedQKVLinear.Config(head_dim=head_dim, n_heads=num_queries, n_kv_heads=num_keys, wqkv=linear),
            wo=Linear.Config(in_features=num_queries * head_dim, out_features=dim),
            qk_norm=RMSNorm.Config(normalized_shape=head_dim, eps=1e-5) if has_norms else None,
            inner_attention=Linear.Config(in_features=1, out_features=1),
            rope=rotation,
        )
        torch.manual_seed(0)
        plain, fast = config.build(), with_kernels(config).build()
        assert type(fast) is KernelAttention
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
        fast.load_state_dict(plain.state_dict())
        for module in (plain, fast):
            for parameter in module.parameters():  # the rotation's table stays in float32
                parameter.data = parameter.data.to(dtype)
        fast.inner_attention = Inner()
        rows, positions = torch.randn(1, 9, dim).to(dtype), torch.randint(64, (1, 9))
        with torch.no_grad():
            fast(rows, None, positions)
            query, key, value = plain.qkv_linear(rows)
            if has_norms:
                query, key = plain.q_norm(query), plain.k_norm(key)
            expected = *plain.rope(query, key, positions), value
        return fast.inner_attention.heads, [part[0].flatten(1) for part in expected]

    def difference(actual, expected):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())

    print(
        json.dumps(
            {
                case: {
                    dtype: dict(zip(("query", "key", "value"), map(difference, *heads_of(case, getattr(torch, dtype)))))
                    for dtype in DTYPES
                }
                for case in CASES
            }
        )
    )


if __name__ == "__main__":
    compare()
