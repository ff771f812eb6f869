"""Tensors in blocks of rows: each element is in one block, and a copy by all cores is a copy."""

import pytest
import torch

from torchtitan_rl.model import row_blocks
from torchtitan_rl.model.row_blocks import copy_all


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (7,), (5, 3), (4, 2, 3, 2), (2, 1000)])
@pytest.mark.parametrize("block_bytes", [1, 24, 2**21])
def test_blocks_cover_a_tensor_once(monkeypatch, shape, block_bytes):
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", block_bytes)
    counts, source = torch.zeros(shape), torch.randn(shape)
    for rows in row_blocks.row_blocks(counts):
        counts[rows] += 1
    assert (counts == 1).all()
    target = torch.zeros(shape)
    copy_all([(target, source)])
    assert torch.equal(target, source)


def test_parameters_of_an_engine_are_copied_in_its_inference_mode():
    with torch.inference_mode():
        target = torch.zeros(3, 4)
        copy_all([(target, torch.ones(3, 4))])
    assert target.sum() == 12
