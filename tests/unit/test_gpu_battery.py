"""The battery of GPU checks, as far as a CPU goes: its order, its books, and the checks that have a small form."""

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import gpu_battery
from scripts.gpu_checks import device, logprob_chunk, runners, steps, versions
from scripts.gpu_checks.catalogue import CHECKS, GPU_TESTS, PARTS, Check
from scripts.gpu_checks.device import peak_bf16_flops
from scripts.gpu_checks.engine_ladder import SHAPES, requests_of, wait_for
from scripts.gpu_checks.result import Result
from scripts.gpu_checks.runners import difference
from tests.integration.helpers import gone
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.model.flops import training_flops

ROOT = Path(__file__).parents[2]
WHOLE = frozenset(module for part in PARTS.values() for module in part)
CPU = gpu_battery.Machine(num_gpus=0, device="cpu", modules=WHOLE)
ONE_GPU = gpu_battery.Machine(num_gpus=1, device="NVIDIA H100 80GB HBM3", modules=WHOLE)
TWO_GPUS = gpu_battery.Machine(num_gpus=2, device="NVIDIA H100 80GB HBM3", modules=WHOLE)

PASSES = """
import json, sys
open(sys.argv[sys.argv.index("--result") + 1], "w").write(
    json.dumps({"status": "passed", "values": {"answer": 42, "steps": [{"s": 1}, {"s": 2}]}, "problems": []}))
"""


def made_up(name: str, code: str, **fields) -> Check:
    return Check(
        **{
            "name": name,
            "teaches": name,
            "needs": "nothing",
            "num_gpus": 0,
            "tiny": True,
            "time_limit_s": 60,
            **fields,
        },
        command=("-c", code),
    )


def test_the_first_six_take_at_most_24_minutes_and_none_more_than_ten():  # as docs/gpu.md says
    assert sum(check.time_limit_s for check in CHECKS[:6]) == 24 * 60
    assert CHECKS[5].name == "steps-local-eager"
    assert all(check.time_limit_s <= 600 for check in CHECKS)
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_the_command_lists_every_check_and_validates_its_config():
    environment = os.environ | {"TORCHTITAN_RL_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_battery.sh"), "--dry-run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in lines] == [check.name for check in CHECKS]
    for line, check in zip(lines, CHECKS):
        assert f" {check.time_limit_s} s," in line and check.teaches in line
        assert ("config valid" in line) == (check.config is not None)


def test_a_config_that_a_run_would_refuse_ends_the_dry_run():
    def broken():
        config = next(check for check in CHECKS if check.config is not None).config()
        config.generator.max_model_len = 8
        return config

    with pytest.raises(ValueError, match="generator.max_model_len=8"):
        gpu_battery.dry_run([made_up("broken", "", config=broken)], CPU)


def test_a_dry_run_names_what_does_not_import(capsys):
    def partial():
        import pydantic_core_of_nobody  # noqa: F401

    gpu_battery.dry_run([made_up("partial", "", config=partial), made_up("next", "")], CPU)
    first, second = capsys.readouterr().out.splitlines()
    assert "config not validated: pydantic_core_of_nobody does not import" in first and " 2. next" in second


@pytest.mark.parametrize(
    "machine, tiny, left_out",
    [
        (ONE_GPU, False, {"tests-two-gpus": "needs 2 GPUs, there is 1"}),
        (TWO_GPUS, False, {}),
        (CPU, True, {check.name: "no GPU" for check in CHECKS if not check.tiny}),
        (ONE_GPU, True, {check.name: "no small form" for check in CHECKS if not check.tiny}),
    ],
)
def test_what_is_left_out_depends_on_the_gpus(machine, tiny, left_out):
    reasons = {check.name: gpu_battery.left_out(check, machine, tiny) for check in CHECKS}
    assert {name: reason for name, reason in reasons.items() if reason} == left_out


@pytest.mark.parametrize(
    "modules, parts, missing",
    [
        ({"torch", "torchtitan"}, {"nothing", "trainer"}, "vllm"),
        ({"torch", "torchtitan", "vllm"}, {"nothing", "trainer", "generator"}, "monarch"),
        ({"torch", "vllm"}, {"nothing"}, "torchtitan"),
    ],
)
def test_parts_of_the_stack_run_what_they_can(modules, parts, missing):
    machine = gpu_battery.Machine(num_gpus=2, device="GPU", modules=frozenset(modules))
    reasons = {check.name: gpu_battery.left_out(check, machine, False) for check in CHECKS}
    assert {name for name, reason in reasons.items() if not reason} == {c.name for c in CHECKS if c.needs in parts}
    assert all(missing in reason and "not installed" in reason for reason in reasons.values() if reason)


def test_a_failure_a_hang_and_a_crash_do_not_stop_the_next(tmp_path):
    fails = PASSES.replace('"passed"', '"failed"').replace('"problems": []', '"problems": ["it is wrong"]')
    checks = [
        made_up("fails", fails + "sys.exit(1)"),
        made_up("hangs", PASSES.replace('"passed"', '"running"') + "import time; time.sleep(60)", time_limit_s=3),
        made_up("crashes", "import os; print('last words', flush=True); os.abort()"),
        made_up("passes", PASSES),
        made_up("needs a GPU", PASSES, num_gpus=1, tiny=False),
    ]
    results = gpu_battery.run(checks, CPU, tmp_path, say=lambda line: None)
    assert [results[check.name]["status"] for check in checks] == [
        "failed",
        "timed out",
        "crashed",
        "passed",
        "skipped",
    ]
    assert results["fails"]["problems"] == ["it is wrong"]
    assert results["hangs"]["values"]["answer"] == 42  # what a check found before it hung is kept
    assert 3 <= results["hangs"]["seconds"] < 30
    assert results["crashes"]["problems"][0].endswith("see log/crashes.log, which ends: last words")
    assert "last words" in (tmp_path / "log" / "crashes.log").read_text()
    assert json.loads((tmp_path / "results.json").read_text()) == results
    table = (tmp_path / "table.md").read_text()
    assert "| fails | cpu, small shapes | failed; it is wrong |" in table
    assert "| hangs | cpu, small shapes | timed out; time_limit_s=3: it had not ended by then" in table
    assert "| needs a GPU | cpu, small shapes | skipped; no GPU | 0.0 |" in table
    assert "- answer: 42" in table and "| s |\n|---|\n| 1 |\n| 2 |" in table


def test_a_suite_of_tests_is_a_check(tmp_path):
    file = tmp_path / "test_made_up.py"
    file.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
    )
    suite = made_up("suite", "")
    suite = dataclasses.replace(suite, command=("-m", "scripts.gpu_checks.suite", str(file)))
    result = gpu_battery.run([suite], CPU, tmp_path / "out", say=lambda line: None)["suite"]
    assert result["status"] == "failed" and result["values"]["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    (problem,) = result["problems"]
    assert "test_made_up.py::test_wrong (call): " in problem and "assert 1 == 2" in problem


async def test_a_process_that_a_check_leaves_behind_ends_with_it(tmp_path):
    child = f"import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n{PASSES}"
    gpu_battery.run([made_up("starts", child)], CPU, tmp_path, say=lambda line: None)
    await gone(int((tmp_path / "log" / "starts.log").read_text()))


def test_a_second_start_goes_on_where_the_first_ended(tmp_path):
    counter = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n{PASSES}"
    checks = [made_up("counts", counter), made_up("crashes", "raise SystemExit(3)")]

    def ran(machine=CPU, **how) -> int:
        gpu_battery.run(checks, machine, tmp_path / "out", say=lambda line: None, **how)
        return len((tmp_path / "ran").read_text())

    assert ran() == 1 and ran() == 1  # the crashed one ran twice, the passed one once
    assert ran(again=True) == 2
    assert ran(ONE_GPU) == 3  # what passed with small shapes says nothing of a GPU
    assert json.loads((tmp_path / "out" / "results.json").read_text())["counts"]["device"] == ONE_GPU.device


def test_no_check_begins_after_the_budget(tmp_path):
    checks = [made_up("first", f"import time; time.sleep(1)\n{PASSES}"), made_up("second", PASSES)]

    def statuses(budget_s: float) -> list[str]:
        results = gpu_battery.run(checks, CPU, tmp_path, budget_s=budget_s, say=lambda line: None)
        return [results[check.name]["status"] for check in checks]

    assert statuses(0.5) == ["passed", "skipped"]
    assert json.loads((tmp_path / "results.json").read_text())["second"]["problems"] == ["budget"]
    assert statuses(60.0) == ["passed", "passed"]  # what was left out runs at the next start


WAITS = (
    PASSES
    + """
import pathlib, time
here = pathlib.Path(sys.argv[sys.argv.index("--result") + 1]).parent
(here / f"{sys.argv[1]}.began").touch()
while len(list(here.glob("*.began"))) < 2:
    time.sleep(0.01)
"""
)


def test_what_measures_nothing_runs_at_once_and_before_the_rest(tmp_path):
    ended = []
    checks = [
        made_up("alone", PASSES),
        *(made_up(name, WAITS.replace("sys.argv[1]", repr(name)), measures=False, time_limit_s=20) for name in "ab"),
    ]
    results = gpu_battery.run(checks, CPU, tmp_path, together=True, say=lambda line: ended.append(line))
    assert all(result["status"] == "passed" for result in results.values())
    assert [line for line in ended if line.startswith("alone")] == ended[-2:]


def test_a_battery_that_is_killed_keeps_what_has_ended(tmp_path):
    """At ten moments, by a signal that nobody can catch."""
    program = f"""
from pathlib import Path

from scripts import gpu_battery
from scripts.gpu_checks.catalogue import Check

cpu = gpu_battery.Machine(num_gpus=0, device="cpu", modules=frozenset({sorted(WHOLE)!r}))
same = dict(teaches="", needs="nothing", num_gpus=0, tiny=True, time_limit_s=60, command=("-c", {PASSES!r}))
gpu_battery.run([Check(name=name, **same) for name in "abc"], cpu, Path({str(tmp_path)!r}), again=True)
"""
    for moment in range(10):
        battery = subprocess.Popen([sys.executable, "-u", "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(1 + moment % 6):  # lines: a check begins, a check has ended
            battery.stdout.readline()
        battery.kill()
        battery.wait()
        kept = json.loads((tmp_path / "results.json").read_text()) if (tmp_path / "results.json").exists() else {}
        assert len(kept) >= min(3, (1 + moment % 6) // 2)
        assert all(result["values"]["answer"] == 42 for result in kept.values())


def test_a_measurement_that_fails_is_named_and_the_next_is_made(tmp_path):
    class OutOfMemoryError(RuntimeError):
        """As torch calls it."""

    def raises(error: Exception):
        raise error

    result = Result(tmp_path / "result.json")
    assert result.attempt("a", lambda: raises(ValueError("no such kernel"))) is None
    assert result.attempt("b", lambda: raises(OutOfMemoryError("80 GiB"))) is None
    assert result.attempt("c", lambda: 7) == 7
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["problems"] == ["a: ValueError: no such kernel"]
    assert written["values"]["out_of_memory"] == ["b"]  # an answer, no fault
    assert not result.finish()


async def test_what_a_rung_leaves_behind_ends_with_it():
    leaves = "import os, subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(2)"
    for last_words, limit_s, code in (("; os._exit(3)", 30, 3), ("; time.sleep(60)", 4, None)):
        process = subprocess.Popen([sys.executable, "-c", leaves + last_words], stdout=subprocess.PIPE, text=True)
        assert wait_for(process, limit_s) == code
        await gone(int(process.stdout.readline()))


def test_no_round_of_a_rung_has_a_prompt_of_another():
    rounds = [requests_of(SHAPES[0], number, vocab_size=151_936) for number in range(2)]
    prompts = {tuple(request.tokens) for requests in rounds for request in requests}
    assert len(prompts) == 128 and all(len(prompt) == 512 for prompt in prompts)


def test_a_check_that_does_not_exist_is_refused_with_the_nearest(capsys):
    assert gpu_battery.main(["--only", "quickstrat", "--dry-run"]) == 2
    assert "--only=quickstrat: there is no such check; did you mean quickstart?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checks_with_a_small_form_run_on_a_cpu(tmp_path):
    names = ("environment", "attention-kernels", "trainer-steps", "engine-ladder", "copies", "logprob-chunk")
    checks = [check for check in CHECKS if check.name in names]
    results = gpu_battery.run(checks, CPU, tmp_path, say=lambda line: None)
    assert {name: (r["status"], r["problems"]) for name, r in results.items()} == dict.fromkeys(names, ("passed", []))
    found = results["environment"]["values"]
    assert found["torch"].startswith("2.13.0") and found["vllm_runner"] == "v1"
    errors = results["attention-kernels"]["values"]["sdpa, float32, head size 128"]
    assert errors.keys() == {"output", "query gradient", "key gradient", "value gradient"}
    assert all(0 < error < 1e-5 for error in errors.values())
    rows = results["trainer-steps"]["values"]["rows"]
    assert len({row["layout"] for row in rows}) == 3 and all(row["tokens_per_s"] > 0 for row in rows)
    rungs = results["engine-ladder"]["values"]["rungs"]
    assert [rung["rung"] for rung in rungs] == ["plain-vllm", "v1-eager", "sleeping-v1-eager"]
    assert all(0 < rung["mismatch_kl"] < 1e-4 for rung in rungs)
    assert all(row["gb_per_s"] > 0 for row in results["copies"]["values"]["copies"])
    chunks = results["logprob-chunk"]["values"]
    assert chunks.keys() == {"product_tflops"} | {
        f"{part}, {size} MiB, plain" for part in ("head", "model") for size in (1, 2)
    }
    for part in ("head", "model"):
        row = chunks[f"{part}, 2 MiB, plain"]
        assert row["head"] == "plain" and row["seconds"] > 0 and row["gradient_norm"] > 0


def test_two_runners_are_compared_up_to_the_first_token_that_differs():
    one = {"tokens": [[5, 6, 7], [8, 9]], "logprobs": [[-1.0, -2.0, -3.0], [-1.0, -1.0]]}
    other = {"tokens": [[5, 6, 4], [8, 9]], "logprobs": [[-1.0, -2.5, -9.0], [-1.25, -1.0]]}
    assert difference(one, other) == (0.5, 0.5)  # the third token's log-probabilities are of different tokens
    assert difference(one, one) == (1.0, 0.0)


@pytest.mark.parametrize("left", [{"status": "running", "values": {}, "problems": []}, None])
def test_a_runner_that_was_killed_fails_the_comparison(tmp_path, monkeypatch, left):
    def killed(command: list[str], timeout: float) -> subprocess.CompletedProcess:
        if left is not None:
            Path(command[command.index("--result") + 1]).write_text(json.dumps(left))
        return subprocess.CompletedProcess(command, -9)

    monkeypatch.setattr(runners.subprocess, "run", killed)
    result = Result(tmp_path / "result.json")
    runners.check(result, argparse.Namespace(model_runner="", tiny=True))
    assert result.problems == [f"{name}: exit status -9 without an end; see the log" for name in ("v1", "v2")]


def test_a_nan_that_is_not_the_first_figure_fails_a_check(tmp_path):
    def problems(name: str, check) -> list[str]:
        result = Result(tmp_path / f"{name}.json")
        check(result)
        return result.problems

    sampled = {"tokens": [[5, 6]], "logprobs": [[-1.0, math.nan]]}
    assert math.isnan(difference(sampled, sampled | {"logprobs": [[-1.0, -1.0]]})[1])

    norms = {1: 1.0, 2: math.nan}
    (problem,) = problems(
        "head", lambda result: logprob_chunk.rows(result, "head", True, lambda mib, head: {"gradient_norm": norms[mib]})
    )
    assert "differ by nan%" in problem
    (problem,) = problems("versions", lambda result: versions.judge(result, [0.01, math.nan]))
    assert problem.startswith("1 of 2 tokens")
    lines = [{"mismatch/kl": kl, "optim/grad_norm": 1.0} for kl in (1e-5, math.nan)]
    (problem,) = problems("steps", lambda result: steps.judge(result, lines))
    assert problem.startswith("mismatch/kl=nan")


def test_one_token_that_went_to_other_experts_does_not_fail_a_mixture(tmp_path):
    def problems(kls: list[float], **arguments) -> list[str]:
        result = Result(tmp_path / "steps.json")
        steps.judge(result, [{"mismatch/kl": kl, "optim/grad_norm": 1.0} for kl in kls], **arguments)
        return result.problems

    assert problems([1e-6, 2e-3, 1e-6]) == ["mismatch/kl=2.0e-03: generator and trainer differ by more than 0.001"]
    assert problems([1e-6, 2e-3, 1e-6], has_experts=True) == []
    assert problems([2e-4, 1e-6, 2e-4], has_experts=True) == [
        "mismatch/kl=2.0e-04: generator and trainer differ by more than 0.0001"
    ]
    assert problems([1e-6, math.nan, 1e-6], has_experts=True)[0].startswith("mismatch/kl=nan")


def test_a_gpu_that_does_not_say_what_is_in_use_is_left_out(monkeypatch):
    monkeypatch.setattr(device, "gpus", lambda: [{"memory.used": "[N/A]"}, {"memory.used": "7"}])
    monkeypatch.setattr(device, "process_memory", lambda: {12: 5})
    with device.PeakMemory() as peak:
        pass  # it has looked once when it ends
    assert (peak.device, peak.processes) == (7, {12: 5})


def test_the_mfu_of_a_step_is_of_the_operations_that_a_run_counts(monkeypatch):
    shape = Qwen3Shape(vocab_size=10, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, hidden_dim=16)
    line = dict.fromkeys(steps.SHOWN, 0.0) | {"time/forward_backward_s": 1.5, "time/optim_s": 0.5, "time/step_s": 4.0}
    line |= {"tokens/trained": 30, "completion/length_mean": 3.0}
    costs = steps.costs(line, shape, "NVIDIA H100 80GB HBM3")
    assert costs["mfu_of_train"] == pytest.approx(training_flops(shape, [3] * 10) / 2 / 989e12, rel=1e-3)
    assert costs["mfu_of_step"] == pytest.approx(costs["mfu_of_train"] / 2, rel=1e-3)


def test_peaks_are_found_by_the_device_name():
    assert peak_bf16_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_bf16_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_bf16_flops("Radeon") is None


SLEEPER = """
import argparse, os, time
from scripts.gpu_checks.result import run_check

def check(result, args):
    result.note(pid=os.getpid())
    time.sleep(90)

run_check(check, argparse.ArgumentParser())
"""
BATTERY = """
import sys
from scripts import gpu_battery
from scripts.gpu_checks.catalogue import Check

gpu_battery.CHECKS[:] = [
    Check(name="sleeper", teaches="", needs="nothing", num_gpus=0, tiny=True, time_limit_s=100, command=(sys.argv[2],))
]
sys.exit(gpu_battery.main(["--tiny", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_a_battery_that_is_stopped_leaves_no_check_behind(tmp_path, number):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    arguments = [str(tmp_path / "out"), str(tmp_path / "sleeper.py")]
    battery = subprocess.Popen([sys.executable, "-c", BATTERY, *arguments], cwd=ROOT)
    result, values = tmp_path / "out" / "json" / "sleeper.json", {}
    deadline = time.monotonic() + 60
    while not values:
        assert time.monotonic() < deadline and battery.poll() is None, "the check has not begun"
        time.sleep(0.1)
        values = json.loads(result.read_text())["values"] if result.exists() else {}
    battery.send_signal(number)
    battery.wait(30)
    await gone(values["pid"])


def test_the_suite_has_every_file_of_tests_for_one_gpu():
    files = {
        str(file.relative_to(Path(__file__).parents[2]))
        for file in (Path(__file__).parents[2] / "tests" / "gpu").glob("test_*.py")
    }
    assert set(GPU_TESTS) == files - {"tests/gpu/test_two_gpus.py"}
