"""The evaluations a controller makes, with a sampler in place of its generators."""

import asyncio
import dataclasses
import json
from functools import partial

import pytest

from tests.kit.run_config import run_config
from tests.kit.sampler import FunctionSampler
from torchtitan_rl import Run
from torchtitan_rl.cli import evaluate, main
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.run import EvalSetConfig
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.rollout.draws import Batch
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.tasks.mixture import Mixture, MixtureSource
from torchtitan_rl.tasks.pass_rate_filter import PassRateFilter, read_pass_rates, write_pass_rates
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.train.start import read_inputs
from torchtitan_rl.types.ends import Preempted
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.validation.run import validate


def short_words(prompt, params):
    """Sorts words of up to four letters and gives longer ones back as they are."""
    word = prompt.removesuffix("=")
    return "".join(sorted(word)) if len(word) <= 4 else word


def controller_of(config, path):
    inputs, run_dir = read_inputs(config), RunDir.create(path)
    generator = FunctionSampler(short_words, inputs.tokenizer)
    # Which started nothing.
    launcher = ActorLauncher(log_dir=None, start_timeout_s=1.0, call_timeout_s=1.0)
    stack = Stack(launcher=launcher, roles={}, generator=generator, versions=None, placement=None)
    return Controller(config, inputs, run_dir, Recorder([RunDirWriter(run_dir)]), stack)


@pytest.fixture
def config():
    config = run_config()
    config.task = LetterSort.Config(min_letters=5, max_letters=6, num_validation=6, num_test=6)
    config.controller.eval_tasks = 6
    config.controller.eval_sets = {
        "pairs": EvalSetConfig(
            task=LetterSort.Config(min_letters=2, max_letters=2, num_validation=3, num_test=3),
            num_samples=2,
            pass_at_k=1,
        ),
        "seen": EvalSetConfig(split="train", num_tasks=5),
    }
    return config


async def test_every_set_has_a_line_of_its_own(config, tmp_path):
    controller = controller_of(config, tmp_path)
    own, sets = await controller.evaluate("validation", pass_at_k=2), await controller.evaluate_sets()
    assert (own.accuracy, own.pass_at_k, list(sets)) == (0.0, 0.0, ["pairs", "seen"])
    lines = controller.run_dir.read_metrics()
    columns = ("eval/name", "eval/split", "eval/num_tasks", "eval/accuracy")
    assert [tuple(line[column] for column in columns) for line in lines] == [
        ("letter_sort", "validation", 6, 0.0),
        ("pairs", "validation", 3, 1.0),
        ("seen", "train", 5, 0.0),
    ]
    assert all(line["phase"] == "evaluation" and line["step"] == 0 for line in lines)
    assert [lines[1][f"eval/{name}"] for name in ("avg_at_2", "pass_at_1", "pass_at_1_ci95_high")] == [1.0, 1.0, 1.0]
    assert lines[1]["eval/pass_at_1_ci95_low"] == pytest.approx(3 / (3 + 1.959964**2))  # Wilson's, of 3 right of 3


async def test_completions_of_every_evaluation_are_recorded(config, tmp_path):
    config.record.eval_completions = 4
    controller = controller_of(config, tmp_path)
    controller.state.step = 3
    await controller.evaluate("validation", pass_at_k=2)
    await controller.evaluate_sets()
    frame = Run.open(tmp_path).completions()
    assert set(frame.step) == {3} and set(frame.attempt) == {1}
    counts = frame.groupby(["name", "split", "sample"]).size().to_dict()
    assert counts == {
        **{("letter_sort", "validation", sample): 4 for sample in (0, 1, 2)},
        **{("pairs", "validation", sample): 3 for sample in (0, 1, 2)},
        ("seen", "train", 0): 4,
    }
    assert frame[frame.name == "pairs"].correct.all() and not frame[frame.name == "letter_sort"].correct.any()
    row = frame[frame.name == "letter_sort"].iloc[0]
    assert row.text + "=" == row.prompt and row.answer == "".join(sorted(row.text))  # words come back unsorted


async def test_no_completions_are_recorded_where_none_are_asked_for(config, tmp_path):
    config.record.eval_completions = 0
    controller = controller_of(config, tmp_path)
    await controller.evaluate("validation")
    assert not (tmp_path / "evaluations").exists() and len(controller.run_dir.read_metrics()) == 1
    config.record.eval_completions = -1
    with pytest.raises(ValueError, match="record.eval_completions=-1: must not be negative"):
        validate(config)


async def test_without_sets_nothing_more_is_evaluated(config, tmp_path):
    config.controller.eval_sets = {}
    controller = controller_of(config, tmp_path)
    assert await controller.evaluate_sets() == {} and controller.run_dir.read_metrics() == []


async def test_a_measured_family_can_be_filtered_and_mixed_in_the_next_run(config, tmp_path):
    config.task = words = LetterSort.Config(min_letters=4, max_letters=5, num_validation=6, num_test=6)
    measured = await controller_of(config, tmp_path / "first").evaluate("train", num_tasks=40)
    write_pass_rates(tmp_path / "rates", measured.pass_rates)
    hard = PassRateFilter.Config(task=words, pass_rates=str(tmp_path / "rates"), min_pass_rate=0.0, max_pass_rate=0.0)
    config.task = Mixture.Config(tasks={"hard": hard, "long": LetterSort.Config(min_letters=6, max_letters=6)})
    second = controller_of(config, tmp_path / "second")
    assert isinstance(second.draws.source, MixtureSource)
    lengths = {(task.id.split("/")[0], len(task.answer)) for task in second.draws.source.next(60)}
    assert lengths == {("hard", 5), ("long", 6)}  # words of four letters were passed
    assert 0.2 < measured.accuracy < 0.8


async def run_eval(config, tmp_path, monkeypatch, *flags):
    """The exit status of `torchtitan-rl eval` on a checkpoint, whose generators are the sampler."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()

    async def launch(config, **kwargs):
        return controller_of(config, tmp_path / "run")

    monkeypatch.setattr(Controller, "launch", launch)
    args = main._parser("eval").parse_args(["eval", "a config", "--checkpoint", str(tmp_path), *flags])
    return await evaluate.evaluate(args, config)


async def test_eval_writes_the_pass_rates_and_prints_every_set(config, tmp_path, monkeypatch, capsys):
    rates = tmp_path / "rates"
    flags = ["--split", "train", "--num-tasks", "4", "--pass-rates", str(rates)]
    assert await run_eval(config, tmp_path, monkeypatch, *flags) == 0
    assert [(rate.split, rate.index, rate.num_correct, rate.num_samples) for rate in read_pass_rates(rates)] == [
        ("train", i, 0, config.controller.pass_at_k) for i in range(4)
    ]
    assert capsys.readouterr().out == (
        "train accuracy 0.0000\npairs validation accuracy 1.0000\nseen train accuracy 0.0000\n"
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--num-tasks", "0"], "--num-tasks=0: must be at least 1"),
        (["--pass-rates", "nowhere/rates"], "--pass-rates=nowhere/rates: cannot be written"),
    ],
)
async def test_mistakes_of_eval_are_refused_before_anything_starts(config, tmp_path, monkeypatch, flags, message):
    with pytest.raises(ValueError, match=message):
        await run_eval(config, tmp_path, monkeypatch, *flags)
    assert not (tmp_path / "run").exists()


def stopping(controller, monkeypatch):
    """What a controller does that trains nothing, whose checkpoints are the evaluations that are due."""
    log = []

    async def train_on(groups, sampled):
        controller.state.step = controller.state.phase_step = controller.state.step + 1
        log.append(f"step {controller.state.step}")
        return {
            "step": controller.state.step,
            "phase": "reinforcement",
            "reward/mean": 0.0,
            "tokens/trained": 1,
            "tokens/generated": 1,
        }

    async def save(**arguments):
        log.append(["checkpoint", *controller.state.evaluations_due])
        return controller.run_dir.path

    async def nothing():
        return Batch(groups=[])

    for part, names in {controller: ("publish", "supervise"), controller.batches: ("next_batch", "cancel")}.items():
        for name in names:
            monkeypatch.setattr(part, name, nothing)
    monkeypatch.setattr(controller, "train_on", train_on)
    monkeypatch.setattr(controller.checkpoints, "save", save)
    monkeypatch.setattr("torchtitan_rl.train.controller.step_line", lambda line, num_steps: "")
    return log


def evaluated(controller):
    lines = controller.run_dir.read_metrics()
    return [(line["eval/name"], line["step"]) for line in lines if line["phase"] == "evaluation"]


async def test_a_run_that_is_to_stop_leaves_its_evaluations_to_the_resumed_one(config, tmp_path, monkeypatch):
    config.controller.num_steps, config.controller.eval_every = 4, 2
    config.controller.checkpoint_every = 0
    controller = controller_of(config, tmp_path / "first")
    controller.state.phase, controller.state.warm_start = "reinforcement", {}
    log = stopping(controller, monkeypatch)
    train_on = controller.train_on

    async def train_on_and_ask(groups, sampled):
        controller.stop.ask("SIGTERM")
        return await train_on(groups, sampled)

    monkeypatch.setattr(controller, "train_on", train_on_and_ask)
    controller.state.step = 1
    with pytest.raises(Preempted, match="SIGTERM"):
        await controller.train()
    assert log == ["step 2", ["checkpoint", "validation", "pairs", "seen"]] and evaluated(controller) == []

    saved = json.loads(json.dumps(dataclasses.asdict(controller.state)))
    resumed = controller_of(config, tmp_path / "resumed")
    resumed.state = RunState(**saved)
    stopping(resumed, monkeypatch)
    resumed.run_dir.write_config({})
    monkeypatch.setattr(resumed, "reinforce", partial(asyncio.sleep, 0))
    resumed.state.warm_start = (await resumed.evaluations.evaluate_split("validation", 0)).summary_data()
    await resumed.train()
    names = ["letter_sort", "pairs", "seen"]
    assert evaluated(resumed)[1:4] == [(name, 2) for name in names] and resumed.state.evaluations_due == []


async def test_a_run_that_is_asked_to_stop_in_the_last_step_of_a_phase_stops_there(config, tmp_path, monkeypatch):
    config.supervised.num_steps, config.task.pairs = 2, True
    for preference, place in ((None, ("reinforcement", 0)), (PreferenceConfig(num_steps=1), ("preference", 0))):
        config.preference = preference
        controller = controller_of(config, tmp_path / place[0])
        log = stopping(controller, monkeypatch)
        controller.stop.ask("SIGTERM")
        with pytest.raises(Preempted, match="SIGTERM"):
            await controller.train()
        assert log == [["checkpoint"]] and (controller.state.phase, controller.state.phase_step) == place


async def test_a_run_that_is_asked_to_stop_during_the_first_evaluation_samples_no_batch(config, tmp_path, monkeypatch):
    controller = controller_of(config, tmp_path)
    controller.state.phase = "reinforcement"
    log, evaluate_sets = stopping(controller, monkeypatch), controller.evaluate_sets

    async def evaluate_and_ask():
        await evaluate_sets()
        controller.stop.ask("SIGTERM")

    monkeypatch.setattr(controller, "evaluate_sets", evaluate_and_ask)
    with pytest.raises(Preempted, match="SIGTERM"):
        await controller.train()
    assert log == [["checkpoint"]] and controller.state.warm_start is not None
    assert [name for name, _ in evaluated(controller)] == ["letter_sort", "pairs", "seen"]


async def test_after_an_early_end_no_evaluation_is_made_twice_at_a_step(config, tmp_path):
    controller = controller_of(config, tmp_path)
    controller.state.step = 4
    await controller.evaluate_all()  # after which a rule of `controller.stop` may end the phase
    report = {name: await controller._evaluation_now(name) for name in ("validation", "pairs", "seen")}
    lines = controller.run_dir.read_metrics()
    assert [line["eval/name"] for line in lines] == ["letter_sort", "pairs", "seen"]
    assert {name: result.accuracy for name, result in report.items()} == {"validation": 0.0, "pairs": 1.0, "seen": 0.0}
    controller.state = RunState(
        **json.loads(json.dumps(dataclasses.asdict(controller.state)))
    )  # as a checkpoint has it
    assert (await controller._evaluation_now("pairs")).metrics() == report["pairs"].metrics()
    controller.state.step = 5
    await controller._evaluation_now("pairs")
    assert [line["step"] for line in controller.run_dir.read_metrics()] == [4, 4, 4, 5]
