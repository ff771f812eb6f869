"""A verifiers environment, played turn by turn through its own methods and judged by its own rubric."""

import asyncio

import pytest

from tests.unit.workflows.scripted import CHARS, policy
from torchtitan_rl.tasks.verifiers import Verifiers
from torchtitan_rl.workflows.multi_turn import Limits, multi_turn

vf = pytest.importorskip("verifiers", reason="an extra of its own: bash scripts/setup.sh verifiers")
if not hasattr(vf, "MultiTurnEnv"):
    pytest.skip("verifiers 0.4 has no MultiTurnEnv", allow_module_level=True)

LIMITS = Limits(max_turns=8, max_tokens=256, timeout_s=20.0, step_timeout_s=10.0)


class Higher(vf.MultiTurnEnv):
    """Says whether the number is higher or lower."""

    async def env_response(self, messages, state, **kwargs):
        guess, number = int(messages[-1]["content"]), int(state["answer"])
        if guess == number:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if number > guess else "lower"}]


def found(completion, answer, **kwargs) -> float:
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    return 0.5 if answer in said else 0.0


def load(max_turns=3, rows=10):
    from datasets import Dataset

    return Higher(
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[found], weights=[2.0]),
        dataset=Dataset.from_dict(
            {
                "prompt": [[{"role": "user", "content": f"number {i}?"}] for i in range(rows)],
                "answer": [str(i) for i in range(rows)],
            }
        ),
    )


def family(load=load, **config):
    return Verifiers.Config(load=load, **({"num_validation": 2, "num_test": 3} | config)).build()


def play(family, task, *said):
    return asyncio.run(
        multi_turn(
            task,
            policy(*said, max_prompt_tokens=128),
            rollout_id="0/0/0",
            seed=0,
            env=family.environment(task),
            limits=LIMITS,
        )
    )


def test_a_game_that_is_won():
    sides = family()
    task = sides.task("train", 0)
    number = int(task.answer["answer"])
    rollout = play(sides, task, f"{number - 1}<eos>", f"{number}<eos>")
    assert (rollout.reward, rollout.end_reason, [turn.reward for turn in rollout.turns]) == (1.0, "done", [0.0, 1.0])
    assert CHARS.decode(rollout.turns[1].prompt_tokens) == (
        f"<user>:number {number}?\n<assistant>:{number - 1}<eos>\n<user>:higher\n<assistant>:"
    )


def test_a_game_that_ends_by_its_own_limit_of_turns():
    sides = family()
    task = sides.task("train", 0)
    rollout = play(sides, task, "99<eos>", "99<eos>", "99<eos>")
    assert (rollout.reward, rollout.end_reason, len(rollout.turns)) == (0.0, "done", 3)


def test_siblings_do_not_share_a_state():
    sides = family()
    task = sides.task("train", 0)
    number = task.answer["answer"]
    assert [play(sides, task, f"{number}<eos>").reward for _ in range(2)] == [1.0, 1.0]


def test_splits_share_no_row():
    sides = family()
    rows = {
        split: {sides.task(split, i).answer["answer"] for i in range(sides.num_tasks(split))}
        for split in ("train", "validation", "test")
    }
    assert [len(rows[split]) for split in ("train", "validation", "test")] == [5, 2, 3]
    assert len(set().union(*rows.values())) == 10


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_validation=2, num_test=8: leave nothing to train on of 10 rows"):
        family(num_test=8)
    with pytest.raises(ValueError, match="verifiers.load: gave a dict; give a MultiTurnEnv"):
        family(load=dict)

    def tools():
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        return vf.ToolEnv(tools=[add], dataset=load().get_dataset(), rubric=vf.Rubric())

    with pytest.raises(ValueError, match="gave a ToolEnv with plain-text prompts or tool calls"):
        family(load=tools)
