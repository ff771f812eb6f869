"""How much longer a step takes with more groups, by hand."""

from torchtitan_rl.tools.bench.measurement import Repeat
from torchtitan_rl.tools.bench.scaling import ScaleMeasurement


def steps(*seconds: float, cpu_s: float) -> list[Repeat]:
    return [Repeat(seconds=of_one, amount=1, cpu_s=cpu_s) for of_one in seconds]


MEASURED = ScaleMeasurement(
    name="scale", steps={2: steps(1.0, 2.0, 1.0, cpu_s=0.02), 16: steps(7.0, 12.0, 8.5, cpu_s=0.24)}
)


def test_growth_is_of_one_round():
    assert MEASURED.growth(16) == [7.0, 6.0, 8.5] and MEASURED.growth(2) == [1.0] * 3


def test_a_line_per_number_of_groups():
    name, fewest, most = MEASURED.lines()
    assert name == "scale" and fewest.startswith("    2 groups    1.000 s,  500.0 ms a group;  1 times the groups take")
    assert "16 groups    8.500 s,  531.2 ms a group;  8 times the groups take  7.00 (6.00 to 8.50) times" in most
    assert most.endswith("processor time of the controller  15.00 ms a group")
    assert MEASURED.as_data()["steps"][16]["growth"] == [7.0, 6.0, 8.5]
