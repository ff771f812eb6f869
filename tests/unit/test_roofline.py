"""Bounds of a step, worked out by hand."""

from pathlib import Path

import pytest

from scripts import roofline
from torchtitan_rl.families import Qwen3Shape

H100 = roofline.DEVICES[0]
PAGE = Path(__file__).parents[2] / "docs" / "gpu" / "roofline.md"


def test_a_decode_step_reads_weights_once_and_the_cache_of_every_sequence():
    shape = Qwen3Shape.of_flavor("0.6B")
    moved = roofline.decode_bytes(shape, 256, 144)
    assert moved["weights"] == 2 * 596_049_920
    assert moved["cache"] == 256 * 145 * 112 * 1024  # 112 KiB a token
    assert moved["logits"] == 4 * 256 * 151_936
    assert roofline.decode_seconds(shape, 256, 144, H100) == pytest.approx(sum(moved.values()) / 3.35e12)


def test_a_step_of_one_token_reads_the_experts_that_it_is_sent_to():
    shape = Qwen3Shape.of_flavor("30B-A3B")
    one, expert = roofline.read_weights(shape, 1), 2 * 48 * 3 * 2048 * 768
    assert one == 2 * (30_532_122_624 - 151_936 * 2048) - 120 * expert
    assert roofline.read_weights(shape, 10_000) == pytest.approx(one + 120 * expert)


def test_what_is_not_counted_lowers_no_ceiling():
    seconds = roofline.TrainingSeconds(products=3.0, again=1.0, logits=2.0, between=None, optimizer=None)
    assert seconds.ceiling("again", "logits") == seconds.ceiling("again", "logits", "between", "optimizer") == 0.5


@pytest.mark.parametrize("name", roofline.TABLES)
def test_the_page_has_the_tables_that_the_command_prints(name):
    assert roofline.markdown(roofline.TABLES[name]()) in PAGE.read_text()
