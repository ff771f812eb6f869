"""Runs opened for reading: data frames, HTML, and directories that are not whole."""

import shutil
import subprocess
import sys

import pytest
import torch

from tests.recorded import RECORDED
from torchtitan_rl import Run, html, tinted
from torchtitan_rl.train.evaluation import Evaluation
from torchtitan_rl.types import Completion, Datum, Rollout, RolloutGroup, Task, Turn

WHOLE = RECORDED / "quickstart-seed0"


def test_metrics_are_a_frame_with_a_row_per_line():
    run = Run.open(WHOLE)
    every, steps = run.metrics(), run.metrics("reinforcement")
    assert len(every) == len(run.lines()) == 25 and list(every["phase"].unique()) == [
        "supervised",
        "evaluation",
        "reinforcement",
        "checkpoint",
    ]
    assert list(steps.index) == list(range(1, 9)) and not steps.isna().any().any()
    line = next(line for line in run.lines() if line["phase"] == "reinforcement" and line["step"] == 5)
    assert {name: steps.loc[5, name] for name in steps.columns} == {
        name: value for name, value in line.items() if name not in ("step", "phase")
    }
    assert "eval/accuracy" not in steps.columns
    evaluations = run.evaluations()
    assert list(evaluations.index) == [0, 4, 8, 8] and evaluations["eval/split"].iloc[-1] == "test"
    assert run.config()["algorithm"]["group_size"] == 4


def test_rollouts_are_a_frame_and_tokens_come_when_asked_for():
    run = Run.open(WHOLE)
    rollouts = run.rollouts()
    assert len(rollouts) == 8 * 4 * 4 and "turns" not in rollouts.columns
    rewards = run.metrics("reinforcement")["reward/mean"]
    assert rollouts.groupby("step").reward.mean().tolist() == pytest.approx(rewards.tolist())
    with_tokens = run.rollouts(tokens=True)
    assert [sum(num) for num in with_tokens.num_tokens] == [
        sum(len(turn["tokens"]) for turn in turns) for turns in with_tokens.turns
    ]


@pytest.mark.parametrize(
    "left, missing",
    [
        ([], ["config.json is missing or cut off", "metrics.jsonl is missing", "no rollouts are recorded"]),
        (["metrics.jsonl"], ["config.json is missing or cut off", "no rollouts are recorded"]),
        (["config.json"], ["metrics.jsonl is missing", "no rollouts are recorded"]),
        (["config.json", "metrics.jsonl", "rollouts"], []),
    ],
)
def test_a_directory_that_is_not_whole_opens_and_says_what_is_missing(tmp_path, left, missing):
    for name in left:
        copy = shutil.copytree if (WHOLE / name).is_dir() else shutil.copy
        copy(WHOLE / name, tmp_path / name)
    run = Run.open(tmp_path)
    assert run.missing() == missing
    assert len(run.metrics()) == (25 if "metrics.jsonl" in left else 0)
    assert len(run.metrics("reinforcement")) == len(run.metrics("supervised")) - 4 * ("metrics.jsonl" in left)
    assert len(run.rollouts()) == (128 if "rollouts" in left else 0) and len(run.evaluations()) in (0, 4)
    shown = run._repr_html_()
    assert all(text in shown for text in missing) and tmp_path.name in shown


def test_files_that_were_cut_off_open_too(tmp_path):
    (tmp_path / "config.json").write_text((WHOLE / "config.json").read_text()[:500])
    lines = (WHOLE / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines[: lines.index("\n") + 40])
    run = Run.open(tmp_path)
    assert run.config() == {} and len(run.metrics()) == 1
    assert run.missing() == ["config.json is missing or cut off", "no rollouts are recorded"]
    with pytest.raises(ValueError, match="run='nowhere': is no directory"):
        Run.open("nowhere")


def test_opening_a_run_starts_nothing_heavy():
    code = (
        f"import sys; from torchtitan_rl import Run; run = Run.open({str(WHOLE)!r}); run.lines(); run._repr_html_();"
        "print([m for m in ('torch', 'vllm', 'monarch', 'torchtitan', 'matplotlib', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\x00\u202eabc\u2066" + "A" * 1_000_000
"""What a policy may say: markup, terminal codes, overrides of direction, a megabyte of one line."""


class Tokenizer:
    """Token 7 is hostile, another one itself."""

    def decode(self, tokens):
        return "".join(HOSTILE if token == 7 else f"<{token}>" for token in tokens)


def group_of(*rewards, text="abc", advantages=None, of_turns=None):
    def rollout(i, reward):
        completion = Completion(tokens=[3, 7], logprobs=[-0.5, -1.0], policy_versions=[4, 4], finish_reason="stop")
        turn = Turn(prompt_tokens=[1], completion=completion, advantages=of_turns)
        return Rollout(id=f"0/0/{i}", task=Task(id="t", prompt="cab="), turns=[turn], reward=reward, text=text)

    rollouts = [rollout(i, reward) for i, reward in enumerate(rewards)]
    return RolloutGroup(id="0/0", rollouts=rollouts, advantages=advantages)


def harmless(shown):
    assert len(shown) < 200_000
    assert "<script" not in shown and "<img" not in shown and "onerror=alert(2)>" not in shown
    assert not {"\x1b", "\x00", "\u202e", "\u2066"} & set(shown)


def test_a_group_is_a_table_tinted_by_advantage():
    shown = group_of(1.0, 0.0, advantages=[0.5, -1.0])._repr_html_()
    assert "cab=" in shown and shown.count("<tr>") == 3 and "+0.500" in shown and "-1.000" in shown
    assert "rgba(0,114,178,0.30)" in shown and "rgba(213,94,0,0.60)" in shown  # half of the largest, and the largest
    undecided = group_of(None, text="x")
    undecided.left_out = "zero_variance"
    assert "left out: zero_variance" in undecided._repr_html_()


def test_tokens_are_shown_one_by_one_with_a_tokenizer():
    shown = tinted(group_of(1.0, 0.0, advantages=[0.5, -1.0]), Tokenizer())._repr_html_()
    assert "token 3, log-probability -0.500, version 4" in shown and "&lt;3&gt;" in shown
    harmless(shown)
    per_token = tinted(group_of(1.0, advantages=[0.0], of_turns=[1.0, -2.0]), Tokenizer())._repr_html_()
    assert "rgba(0,114,178,0.30)" in per_token and "rgba(213,94,0,0.60)" in per_token


def test_a_datum_shows_what_trains():
    datum = Datum(
        tokens=torch.tensor([5, 9, 3]),
        target_tokens=torch.tensor([9, 3, 7]),
        loss_inputs={
            "token_weights": torch.tensor([0.0, 0.5, 0.5]),
            "loss_mask": torch.tensor([0.0, 1.0, 1.0]),
            "advantages": torch.tensor([9.0, 1.0, -2.0]),
        },
    )
    shown = datum._repr_html_()
    assert "3 tokens, 2 of them trained, tinted by advantages" in shown
    assert '<span style="opacity:.5">9</span>' in shown  # the prompt's, whatever its advantage
    assert "rgba(0,114,178,0.30)" in shown and "rgba(213,94,0,0.60)" in shown
    harmless(tinted(datum, Tokenizer())._repr_html_())


def test_what_a_model_says_is_harmless_text():
    harmless(html.safe(HOSTILE))
    assert html.safe(HOSTILE).startswith("&lt;script&gt;") and "&lt;U+202E&gt;" in html.safe(HOSTILE)
    assert "more characters" in html.safe(HOSTILE)
    harmless(group_of(1.0, text=HOSTILE, advantages=[1.0])._repr_html_())
    harmless(html.facts(HOSTILE, {HOSTILE: HOSTILE}))


def test_an_evaluation_is_a_table():
    result = Evaluation(name="<b>", split="test", num_tasks=8, accuracy=0.25, intervals={"accuracy": (0.1, 0.4)})
    shown = result._repr_html_()
    assert "&lt;b&gt;, test" in shown and "0.25" in shown and "eval/accuracy_ci95_low" in shown and "<b>" not in shown
