"""The search for the cause of a gap."""

import torch

from torchtitan_rl.mismatch.search import CauseSearch


def test_tensors_of_other_shapes_show_no_cause():
    search = CauseSearch(rescorer=None, limits=None, dtype="float32", adapted=False)
    published, cut = {"a": torch.ones(4)}, {"a": torch.ones(2)}
    assert search._of_tensors(published, cut, published) is None
