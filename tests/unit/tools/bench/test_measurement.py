"""Medians, ratios and intervals, by hand."""

import pytest

from torchtitan_rl.tools.bench.measurement import Measurement, Repeat, interval


def repeats(*seconds: float, amount: int = 100) -> list[Repeat]:
    return [Repeat(seconds=of_one, amount=amount) for of_one in seconds]


def measurement(**more) -> Measurement:
    sides = {"ours": repeats(2.0, 4.0, 5.0), "slow": repeats(8.0, 8.0, 8.0), "fast": repeats(1.0, 4.0, 2.0)}
    return Measurement(name="generate 3m float32 fixed", unit="tokens", sides=sides, **more)


def test_the_floor_is_the_side_with_the_best_median():
    assert measurement().floor == "fast" and measurement().seconds("fast") == 2.0 and measurement().rate("fast") == 50


def test_a_ratio_is_of_one_round_and_the_median_counts():
    assert measurement().ratios("fast") == [0.5, 1.0, 0.4] and measurement().ratio == 0.5


def test_our_side_is_never_the_floor():
    sides = {"ours": repeats(1.0), "floor": repeats(4.0)}
    assert Measurement(name="", unit="tokens", sides=sides).ratio == 4.0


def test_the_better_of_our_sides_counts_and_neither_is_the_floor():
    sides = {"ours": repeats(4.0), "ours compiled": repeats(2.0), "floor": repeats(3.0), "slow": repeats(8.0)}
    of_both = Measurement(name="", unit="tokens", sides=sides)
    assert (of_both.best, of_both.floor, of_both.ratio) == ("ours compiled", "floor", 1.5)
    assert of_both.lines()[-2] == "  ours compiled / floor, by speed: 1.50 (1.50 to 1.50)"
    assert measurement().best == "ours"


def test_another_amount_counts_by_its_speed():
    sides = {"ours": repeats(1.0, amount=50), "floor": repeats(1.0)}
    assert Measurement(name="", unit="tokens", sides=sides).ratio == 0.5


def test_the_interval_of_equal_ratios_is_one_point_and_of_others_lies_among_them():
    assert interval([0.7, 0.7, 0.7]) == (0.7, 0.7)
    low, high = interval([0.5, 0.6, 0.7, 0.8, 0.9])
    assert (low, high) == interval([0.5, 0.6, 0.7, 0.8, 0.9]) and 0.5 <= low < 0.7 < high <= 0.9


def test_lines_and_data_have_the_same_numbers():
    made = measurement(parts={"generator-0-0: engine step": 3.0, "2 smaller parts": 1.0})
    lines, data = made.lines(), made.as_data()
    assert lines[0] == "generate 3m float32 fixed"
    assert "4.000 s (2.000 to 5.000)" in lines[1] and "25 tokens/s" in lines[1]
    assert lines[4] == "  ours / fast, by speed: 0.50 (0.40 to 1.00)"
    assert lines[5] == "  ours / slow, by speed: 2.00 (1.60 to 4.00)"
    assert lines[6] == "       3.000 s  75.0%  generator-0-0: engine step"
    assert data["sides"]["ours"]["median_s"] == 4.0 and data["sides"]["ours"]["tokens_per_s"] == 25
    fast = data["sides"]["fast"]
    assert (data["floor"], data["ratio"], fast["ratio_low"], fast["ratio_high"]) == ("fast", 0.5, 0.4, 1.0)
    assert data["sides"]["slow"]["ratios"] == [4.0, 2.0, 1.6]


@pytest.mark.parametrize("amount, text", [(2_000_000_000, "    2.00 GB/s"), (500_000_000, "    0.50 GB/s")])
def test_bytes_are_shown_in_gigabytes(amount, text):
    sides = {"ours": repeats(1.0, amount=amount), "memcpy": repeats(1.0, amount=amount)}
    assert Measurement(name="", unit="bytes", sides=sides).lines()[1].endswith(text)
