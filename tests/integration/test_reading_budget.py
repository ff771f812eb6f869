"""The way through a plain step does not get longer again: what is off is not on it."""

from scripts.reading_budget import measured
from tests.integration.conftest import ROOT

# The aim is 38 files, 4,500 and 1,800 lines: lower these numbers when the way is shorter. The ledger, the question
# whether to stop, the check of every load and records of tokens are on each step's way.
OFF = tuple(
    f"{name}.py"
    for name in (
        *("algorithm/distill", "algorithm/filters", "algorithm/precomputed", "algorithm/soft_targets"),
        *("algorithm/terms", "algorithm/turn_rewards", "actors/operations", "types/calls"),
        *("dispatch/placement", "dispatch/router", "dispatch/repair", "dispatch/sampling_client"),
        *(
            "dispatch/training_client",
            "dispatch/versions",
            "algorithm/grouping",
            "algorithm/inputs",
            "algorithm/refusals",
            "model/lora",
            "model/scoring",
            "model/vllm_engine",
        ),
        *("run/controller", "run/resampling", "run/scoring", "run/checkpoints", "run/resume", "run/state"),
        *("run/failures", "run/numeric_guard", "run/policy_weights", "tasks/complaints", "weights/role_copies"),
    )
)
CEILING = {"files": 38, "file_lines": 4496, "function_lines": 2_021}


def test_a_plain_step_runs_through_no_more_than_it_did():
    rows, found = measured(str(ROOT / "configs" / "quickstart.py"))
    assert found["files"] == len(rows) > 20
    assert all(found[name] <= ceiling for name, ceiling in CEILING.items()), f"{found}, at most {CEILING}\n{rows}"
    assert not [name for _, _, name in rows if name.endswith(OFF)]
