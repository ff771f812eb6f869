"""What the verb `certify` takes as layouts."""

import argparse

import pytest

from torchtitan_rl.cli.certify import _layouts


def test_layouts_are_pairs_of_degrees():
    assert _layouts("2x1,1x2") == ((2, 1), (1, 2))


@pytest.mark.parametrize("text", ["0x1", "-1x2", "2x1,1x0", "2", "2x1x1", "axb"])
def test_a_layout_without_ranks_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write FSDPxTP, such as 2x1,1x2,2x2"):
        _layouts(text)
