"""Which tensors are finite, whatever their dtype and wherever the wrong number lies."""

import pytest
import torch

from torchtitan_rl.weights.finite import FiniteCheck, is_finite

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])


@DTYPES
@pytest.mark.parametrize("place", [0, 131071, 131072, -1])
@pytest.mark.parametrize("wrong", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_one_wrong_number_is_seen_wherever_it_is(dtype, place, wrong):
    tensor = torch.linspace(-3, 3, 300_001).to(dtype)
    assert is_finite(tensor)
    tensor[place] = wrong
    assert not is_finite(tensor)


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_is_finite_also_where_all_have_one_sign(dtype, sign):
    tensor = torch.full((7, 9), sign * torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(tensor)
    tensor[6, 8] = sign * float("inf")
    assert not is_finite(tensor)


@DTYPES
def test_every_pattern_of_sixteen_bits_is_judged_as_torch_does(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    bits = patterns.to(torch.int16)
    shift = 8 * dtype.itemsize - 16
    if shift:
        bits = patterns.to(torch.int64) << shift
        bits = bits.to(torch.int32) if dtype.itemsize == 4 else bits
    values = bits.view(dtype)
    assert [is_finite(values[i : i + 1]) for i in range(0, 2**16, 7)] == values[::7].isfinite().tolist()


def test_a_check_names_the_first_tensor_after_the_cast_and_passes_over_integers():
    check = FiniteCheck()
    fine, large = torch.ones(3), torch.tensor([3.4e38])
    check.add("numbers", torch.tensor([1]), torch.tensor([1]))
    check.add("empty", torch.zeros(0), torch.zeros(0))
    check.add("fine", fine, fine)
    assert check.first() == ""
    check.add("cast", large, large.to(torch.bfloat16))  # finite in float32, infinite in bfloat16
    check.add("later", fine * float("nan"), fine * float("nan"))
    assert check.first() == "cast"
