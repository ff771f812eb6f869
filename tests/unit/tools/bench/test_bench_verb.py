"""What the bench refuses before it starts anything, and what the short form compares with."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from torchtitan_rl import platform
from torchtitan_rl.cli import main
from torchtitan_rl.tools.bench import bench_verb, generation, machine, memory_use, short_form, side, syncing, training
from torchtitan_rl.tools.bench.measurement import Measurement, Repeat
from torchtitan_rl.tools.bench.workload import SHAPES, Workload


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a side was started")

    monkeypatch.setattr(side.Side, "__init__", refuse)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["generat"], "subject='generat': there is no such bench; use generate, train, sync, step, scale, memory"),
        (["train", "--repeats", "0"], "--repeats=0: must be at least 1"),
        (["train", "--floor-python", "python3"], "--floor-python='python3': is for step"),
        (["train", "--against", "../other"], "--against='../other': is for startup"),
        (["memory", "--lengths", "fixed"], "--lengths=fixed: is for generate, train, step; name one of these, or"),
        (["startup", "--size", "32m", "--dtypes", "bfloat16"], "--size='32m': is for generate, train, sync, step"),
        (["startup", "--dtypes", "bfloat16"], "--dtypes=bfloat16: is for generate, train, sync, step, scale, memory;"),
        (["scale", "--lengths", "skewed"], "--lengths=skewed: is for generate, train, step"),
        (["sync", "--lengths", "skewed"], "--lengths=skewed: is for generate, train, step"),
        (["sync", "--floors", "eager"], "--floors=eager: is for generate, train; name one of these, or leave it out"),
        (["generate", "startup", "--against", "/nowhere"], "--against='/nowhere': has no torchtitan_rl/assets/quick"),
        (["startup", "--against", "/nowhere"], "--against='/nowhere': has no torchtitan_rl/assets/quickstart.py"),
        (["sync", "--short"], "--short: has no stored ratio for sync"),
        (["train", "--family", "llama3"], "--family=llama3: is for generate alone"),
        (["generate", "--family", "llama3", "--size", "0.6b"], "--family=llama3: has no size 0.6b; use 3m, 32m"),
        (["generate", "--short", "--floors", "compiled"], "--short: has stored ratios of Qwen3 and vLLM eager"),
        (["train", "sync", "--prompts", "4"], "--prompts=4: is for generate and train without --short"),
        (["generate", "--short", "--group-size", "1"], "--group-size=1: is for generate and train without --short"),
        (["generate", "--group-size", "0"], "--group-size=0: must be at least 1"),
        (["generate", "--fixed-tokens", "257"], "--fixed-tokens=257: must be at most 256, the longest completion"),
        (["train", "--short", "--dtypes", "bfloat16"], "--short: says size, dtypes and lengths itself"),
    ],
)
def test_arguments_that_make_no_bench_are_refused(words, reason, capsys):
    assert main.main(["bench", *words]) == 1
    assert reason in capsys.readouterr().err


def test_a_length_that_does_not_exist_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", "generate", "--lengths", "fixed,long"])
    assert "'fixed,long': write some of fixed,skewed" in capsys.readouterr().err


@pytest.mark.skipif(platform.device_type() == "cuda", reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_no_cpu(capsys):
    assert main.main(["bench", "generate", "--device", "cuda"]) == 2
    assert "--device=cuda: torch finds 0 GPUs here" in capsys.readouterr().err


@pytest.mark.skipif(platform.device_type() == "cuda", reason="there is a GPU")
@pytest.mark.parametrize("subject", ["generate", "train", "sync"])
def test_too_little_memory_is_refused_with_numbers(subject, capsys, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    assert main.main(["bench", subject, "--size", "0.6b", "--dtypes", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert f"--size=0.6b: {subject} in bfloat16 needs about " in error and "this machine has 1.0 GiB free" in error


@pytest.mark.parametrize(
    "words, calls",
    [
        (["sync"], ["sync float32", "sync bfloat16"]),
        (
            ["train", "sync", "--dtypes", "bfloat16", "--floors", "eager"],
            ["train bfloat16 fixed,skewed", "sync bfloat16"],
        ),
        (["train", "--dtypes", "bfloat16", "--floors", "eager,compiled"], ["train bfloat16 fixed,skewed and compiled"]),
        (["generate", "train", "--short"], ["generate 3m float32 fixed,skewed vLLM eager", "train float32 skewed"]),
        (
            ["generate", "--family", "qwen3,llama3", "--dtypes", "float32", "--floors", "eager"],
            ["generate 3m,llama3 3m float32 fixed,skewed vLLM eager"],
        ),
        (
            "generate --size 32m --prompts 3 --group-size 1 --fixed-tokens 32 --dtypes float32 --floors eager".split(),
            ["generate 32m [32, 32, 32] float32 fixed,skewed vLLM eager"],
        ),
    ],
)
def test_each_subject_is_measured_in_each_dtype(words, calls, monkeypatch, capsys):
    made = []

    def generate(workloads, lengths, *arguments, floors):
        names = ",".join(workload.name for workload in workloads)
        if workloads[0].num_completions == 3:
            names += f" {workloads[0].completion_lengths('fixed')}"
        made.append(f"generate {names} {workloads[0].dtype} {','.join(lengths)} {','.join(floors)}")
        return []

    def train(workload, lengths, *arguments, compiled):
        made.append(f"train {workload.dtype} {','.join(lengths)}{' and compiled' if compiled else ''}")
        return []

    def sync(workload, *arguments):
        made.append(f"sync {workload.dtype}")
        return []

    monkeypatch.setattr(platform, "missing_compiler", lambda: "")
    monkeypatch.setattr(generation, "measure_generation", generate)
    monkeypatch.setattr(training, "measure_training", train)
    monkeypatch.setattr(syncing, "measure_sync", sync)
    monkeypatch.setattr(bench_verb.signal, "signal", lambda *arguments: None)
    assert main.main(["bench", *words, "--json"]) == 0
    assert made == calls and json.loads(capsys.readouterr().out)["measurements"] == []


def test_a_subject_that_fails_loses_none_that_was_measured_before(monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("a side ended")

    monkeypatch.setattr(training, "measure_training", lambda *arguments, compiled: [measured("train", 0.5)])
    monkeypatch.setattr(syncing, "measure_sync", fail)
    monkeypatch.setattr(bench_verb.signal, "signal", lambda *arguments: None)
    assert main.main(["bench", "train", "sync", "--dtypes", "float32", "--json"]) == 1
    printed = capsys.readouterr()
    assert [one["name"] for one in json.loads(printed.out)["measurements"]] == ["train"]
    assert "a side ended" in printed.err


def test_the_memory_is_that_of_all_sides_at_once():
    shape = SHAPES["qwen3"]["0.6b"]
    workload, floors = Workload(size="0.6b", shape=shape, dtype="bfloat16"), ["vLLM eager", "vLLM compiled"]
    needed = machine.needed_bytes("generate", workload, floors=floors)
    weights = 2 * shape.num_parameters
    assert list(needed) == ["ours", "ours compiled", "vLLM eager", "vLLM compiled"]
    assert needed["ours compiled"] > needed["ours"] > needed["vLLM eager"] > weights
    assert list(machine.needed_bytes("generate", workload, floors=["vLLM eager"])) == ["ours", "vLLM eager"]
    # float32 parameters, gradients and two moments
    assert machine.needed_bytes("train", workload, floors=[])["ours"] > 16 * shape.num_parameters
    assert list(machine.needed_bytes("train", workload, floors=[])) == ["ours", "bare torch"]
    compiled = machine.needed_bytes("train", workload, floors=floors)
    assert list(compiled) == ["ours", "bare torch", "ours compiled", "bare torch compiled"]


def test_the_memory_of_several_families_adds_up(monkeypatch):
    workloads = [Workload(size="3m", shape=SHAPES[name]["3m"], dtype="float32") for name in ("qwen3", "llama3")]
    each = [sum(machine.needed_bytes("generate", workload, floors=["vLLM eager"]).values()) for workload in workloads]
    free = SimpleNamespace(available=sum(each) - 1)
    monkeypatch.setattr(machine, "local_host", lambda: SimpleNamespace(cuda=None))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(machine.CannotMeasure, match="3m ours .*, llama3 3m vLLM eager "):
        machine.check_memory("generate", workloads, floors=["vLLM eager"])
    free.available += 1
    machine.check_memory("generate", workloads, floors=["vLLM eager"])


@pytest.mark.parametrize("python", ["", "/nowhere/bin/python", sys.executable])
def test_steps_without_trl_are_refused_with_how_to_install_it(python, capsys):
    assert main.main(["bench", "step", "--floor-python", python]) == 2
    error = capsys.readouterr().err
    assert f"--floor-python={python!r}: " in error and "pip install torch==2.13.0 trl==1.16.0" in error


def test_memory_of_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert main.main(["bench", "memory"]) == 2
    assert "--device=cuda: memory counts the machine's memory, not a GPU's" in capsys.readouterr().err


@pytest.mark.skipif(platform.device_type() == "cuda", reason="there is a GPU")
@pytest.mark.parametrize("rollup", [None, "55d0-7ffc ---p 00000000 00:00 0 [rollup]\nRss: 10 kB\n"])
def test_memory_is_refused_where_the_system_does_not_say_it(rollup, monkeypatch, capsys):
    class Other(type(Path())):
        def read_text(self, *arguments, **named):
            if rollup is None:
                raise FileNotFoundError(str(self))
            return rollup

    monkeypatch.setattr(memory_use, "Path", Other)
    assert main.main(["bench", "memory"]) == 2
    assert "/proc/PID/smaps_rollup: does not say here what a process holds" in capsys.readouterr().err


@pytest.mark.parametrize("subject", ["generate", "train"])
def test_compiling_without_a_compiler_is_refused(subject, monkeypatch, capsys):
    monkeypatch.setattr(platform, "missing_compiler", lambda: "PATH has no C++ compiler")
    assert main.main(["bench", subject, "--floors", "compiled"]) == 2
    assert "--floors: PATH has no C++ compiler" in capsys.readouterr().err


def measured(name: str, ratio: float) -> Measurement:
    sides = {"ours": [Repeat(seconds=1 / ratio, amount=1)], "floor": [Repeat(seconds=1.0, amount=1)]}
    return Measurement(name=name, unit="tokens", sides=sides)


def test_a_ratio_is_worse_beyond_the_margin(tmp_path, monkeypatch):
    (tmp_path / "ratios.json").write_text(json.dumps({"margin": 0.25, "ratios": {"a": 0.8, "b": 0.8}}))
    monkeypatch.setattr(short_form, "FILE", tmp_path / "ratios.json")
    (line,) = short_form.worse_than_stored([measured("a", 0.61), measured("b", 0.59)])
    assert line.startswith("b: 0.59 of floor's speed; stored is 0.80, less 25% is 0.60; look for what made it slower")


def test_each_measurement_of_the_short_form_has_a_stored_ratio():
    margin, ratios = short_form.stored_ratios()
    assert ratios.keys() == {f"{name} 3m float32 skewed" for name in ("generate", "train")} | {
        "generate 3m float32 fixed"
    }
    assert 0 < margin < 0.5 and all(0.1 < ratio < 2 for ratio in ratios.values())
