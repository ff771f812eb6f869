"""Recorded runs of the quickstart, a few steps each: `quickstart-seed0` and `-seed1` differ in nothing but the seed,
`groups-seed0` and `-seed1` differ from them in `algorithm.group_size`. Made by `python -m tests.recorded`."""

from pathlib import Path

RECORDED = Path(__file__).parent
