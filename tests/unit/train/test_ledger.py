"""How draws end."""

from torchtitan_rl.rollout.draws import Batch, Draw, admissions, outcomes
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Task, Turn


def draw(slot: int, round: int = 0) -> Draw:
    return Draw(slot=slot, round=round, task=Task(id=f"t/{slot}", prompt="p"))


def group(name: str, *versions: list[int], named: bool = True) -> RolloutGroup:
    rollouts = []
    for index, of_rollout in enumerate(versions):
        completion = Completion(
            tokens=[1] * len(of_rollout), logprobs=[0.0] * len(of_rollout), policy_versions=of_rollout,
            finish_reason="stop",
        )  # fmt: skip
        turn = Turn(prompt_tokens=[1], completion=completion)
        group = name if named else ""
        rollouts.append(Rollout(id=f"{name}/{index}", task=Task(id="t", prompt="p"), turns=[turn], group=group))
    return RolloutGroup(id=name, rollouts=rollouts)


def test_a_draw_begins_with_its_task():
    assert admissions([draw(3, 1)]) == [{"draw": "3/1", "event": "admitted", "task_id": "t/3"}]


def test_every_draw_of_a_batch_ends_in_one_way():
    batch = Batch(
        draws=[draw(0), draw(1), draw(2), draw(3), draw(1, 1)],
        groups=[group("0/0", [4, 4], [4, 5]), group("1/1", [5]), group("3/0", [5], named=False)],
        left_out=[group("1/0", [4]), group("0/0", [3])],  # of 0/0 one rollout was too long
    )
    found = {
        record["draw"]: (record["event"], record["version_min"], record["version_max"]) for record in outcomes(batch)
    }
    assert found == {
        "0/0": ("trained", 3, 5),
        "1/0": ("filtered", 4, 4),
        "2/0": ("failed", None, None),
        "3/0": ("trained", 5, 5),
        "1/1": ("trained", 5, 5),
    }
