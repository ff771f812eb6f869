"""Bounds of a step, worked out by hand."""

import json
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


def test_a_rung_that_ended_between_its_shapes_has_no_figure_of_the_second(tmp_path, monkeypatch):
    first, second = (requests.column for requests in roofline.REQUESTS)
    rungs = [{"rung": "v2-graphs", first: 2.0, second: ""}, {"rung": "v2-graphs", first: 4.0, second: ""}]
    (tmp_path / "h100.json").write_text(json.dumps({"engine-ladder": {"values": {"rungs": rungs}}}))
    monkeypatch.setattr(roofline, "MEASURED", tmp_path)
    assert roofline.rungs(H100) == {"v2-graphs": {first: 3.0, second: None}}
    monkeypatch.setattr(roofline, "DEVICES", (H100,))
    cells = [row[7:] for row in roofline.decoding() if row[0] == "0.6B"]
    assert cells == [["", "3", "", ""], ["", "", "", ""]]


@pytest.mark.parametrize("name", roofline.TABLES)
def test_the_page_has_the_tables_that_the_command_prints(name):
    assert roofline.markdown(roofline.TABLES[name]()) in PAGE.read_text()
