"""Puzzles of reasoning-gym: splits, verifiers, and settings it does not know."""

import subprocess
import sys

import pytest

from torchtitan_rl.tasks.reasoning_gym import ReasoningGym

ADD = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}}


@pytest.fixture(autouse=True)
def _needs_the_extra():
    pytest.importorskip("reasoning_gym")


def reasoning_gym(**config):
    small = {"datasets": ADD, "num_train": 20, "num_validation": 6, "num_test": 8}
    return ReasoningGym.Config(**{**small, **config}).build()


def questions(family, split):
    return [family.task(split, i).answer["entry"]["question"] for i in range(family.num_tasks(split))]


def test_importing_the_family_imports_neither_it_nor_other_heavy_packages():
    program = (
        "import sys, torchtitan_rl.tasks.reasoning_gym, torchtitan_rl.tasks.gsm8k, torchtitan_rl.tasks.letter_sort; "
        "print([name for name in ('reasoning_gym', 'datasets', 'vllm', 'monarch') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_a_task_asks_for_the_answer_between_tags():
    task = reasoning_gym().task("train", 3)
    assert task.id == "reasoning_gym/train/3"
    assert [message["role"] for message in task.prompt] == ["system", "user"]
    assert "<answer>" in task.prompt[0]["content"]
    assert task.prompt[1]["content"].startswith("State the final answer to the following arithmetic problem: ")
    assert task.answer["dataset"] == "chain_sum"
    assert reasoning_gym(answer_tags=False).task("train", 3).prompt == task.prompt[1]["content"]


def test_tasks_are_a_function_of_the_config():
    assert questions(reasoning_gym(), "train") == questions(reasoning_gym(), "train")
    assert questions(reasoning_gym(), "train") != questions(reasoning_gym(seed=1), "train")
    # Asked for in another order too.
    family = reasoning_gym()
    assert family.task("train", 19) == reasoning_gym().task("train", 19)


def test_splits_have_their_sizes_and_share_no_question():
    family = reasoning_gym()
    splits = {split: questions(family, split) for split in ("train", "validation", "test")}
    assert [len(asked) for asked in splits.values()] == [20, 6, 8]
    train, validation, test = (set(asked) for asked in splits.values())
    assert not (train & validation or train & test or validation & test)
    with pytest.raises(IndexError, match="index=6: reasoning_gym has 6 tasks in validation"):
        family.task("validation", 6)


def test_splits_stay_apart_where_the_same_questions_come_up_again_and_again():
    # Sums of two digits: 10 * 10 * 2 signs = 200 questions, of which 500 train tasks would meet all.
    small = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    family = reasoning_gym(datasets=small, num_train=500)
    train, validation, test = (set(questions(family, split)) for split in ("train", "validation", "test"))
    assert not (train & validation or train & test or validation & test)


def test_a_split_with_nothing_of_its_own_is_an_error():
    # Products of two digits: 100 questions, and a test split that holds them all.
    small = {"products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    family = reasoning_gym(datasets=small, num_train=3, num_validation=0, num_test=2000)
    with pytest.raises(ValueError, match=r"every train question is also one of validation or test; make the data set"):
        family.task("train", 0)


def test_data_sets_take_turns():
    family = reasoning_gym(datasets={**ADD, "spell_backward": {}}, num_train=5)
    assert [family.task("train", i).answer["dataset"] for i in range(5)] == [
        "chain_sum",
        "spell_backward",
        "chain_sum",
        "spell_backward",
        "chain_sum",
    ]


def test_reward_is_the_verifiers_score_of_the_tagged_answer():
    family = reasoning_gym()
    task = family.task("test", 0)
    right = task.answer["entry"]["answer"]
    completions = [
        f"<answer>{right}</answer>",
        f"<answer>1</answer> no: <answer> {right}.00 </answer>",  # the last counts, and the verifier knows decimals
        right,
        "<answer></answer>",
        "<answer>x</answer>",
        "",
    ]
    assert family.reward(task, completions) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert reasoning_gym(answer_tags=False).reward(task, [right, "x"]) == [1.0, 0.0]


def test_each_task_is_judged_by_its_own_data_set():
    family = reasoning_gym(datasets={**ADD, "spell_backward": {}})
    task = family.task("train", 1)
    right = task.answer["entry"]["answer"]
    assert family.reward(task, [f"<answer>{right}</answer>", "<answer>1</answer>"]) == [1.0, 0.0]


def test_an_answer_at_which_the_verifier_raises_is_wrong():
    # The verifier of prime_factorization calls int() on the parts of an answer.
    family = reasoning_gym(datasets={"prime_factorization": {}}, answer_tags=False)
    task = family.task("train", 0)
    assert family.reward(task, [task.answer["entry"]["answer"], "x"]) == [1.0, 0.0]


def test_a_verifier_that_cannot_take_the_right_answer_is_an_error():
    family = reasoning_gym(datasets={"prime_factorization": {}}, answer_tags=False)
    task = family.task("train", 0)
    task.answer["entry"]["answer"] = "x"
    with pytest.raises(ValueError, match="invalid literal"):
        family.reward(task, ["x"])


def test_a_reward_of_ones_own_takes_the_place_of_the_familys():
    family = reasoning_gym(reward=lambda task, completions: [7.0])
    assert family.reward(family.task("train", 0), [""]) == [7.0]


@pytest.mark.parametrize(
    "names, complaint",
    [
        ({}, "reasoning_gym.datasets={}: is empty"),
        ({"sudokoo": {}}, r"reasoning_gym.datasets\['sudokoo'\]: reasoning-gym has no such data set"),
        ({"chain_sum": {"terms": 2}}, r"\['chain_sum'\]\['terms'\]: there is no such setting; use one of .*max_terms"),
        ({"chain_sum": {"seed": 2}}, r"\['chain_sum'\]\['seed'\]: is derived; set reasoning_gym.seed"),
        ({"chain_sum": {"min_terms": -2}}, r"\['chain_sum'\]=\{'min_terms': -2\}: is refused \(.*min_terms"),
    ],
)
def test_settings_that_reasoning_gym_does_not_know_are_refused(names, complaint):
    with pytest.raises(ValueError, match=complaint):
        reasoning_gym(datasets=names)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RuntimeError, match="bash scripts/setup.sh reasoning-gym"):
        reasoning_gym()


async def test_wrong_answers_may_be_mended_in_several_turns():
    family = reasoning_gym(num_attempts=3)
    task = family.task("train", 0)
    right = f"<answer>{task.answer['entry']['answer']}</answer>"
    assert reasoning_gym().environment(task) is None

    async def play(*texts):
        env = family.environment(task)
        assert await env.reset() == task.prompt
        return [await env.step(text) for text in texts]

    wrong, mended = await play("<answer>x</answer>", right)
    assert (wrong.done, wrong.reward, wrong.observation[0]["role"]) == (False, 0.0, "user")
    assert (mended.done, mended.reward) == (True, 1.0)
    assert [step.done for step in await play("", "", "")] == [False, False, True]
    with pytest.raises(ValueError, match="reasoning_gym.num_attempts=0: must be at least 1"):
        ReasoningGym.Config(num_attempts=0)
