"""The command as a user types it: short runs, mistakes, Ctrl-C. Nothing may be left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import SHORT, small_config
from tests.integration.leftovers import nothing_left
from tests.kit.forks.server import in_use
from torchtitan_rl import metrics
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "torchtitan_rl.cli"]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


def run(*arguments: str, timeout: float = 150) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


@pytest.fixture(autouse=True)
def leftovers():
    with nothing_left():
        yield


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_the_files_it_promises(short_run):
    path = short_run.path
    assert "greedy accuracy after reinforcement (test, looked at once)" in short_run.stdout
    records = lines(path)
    for phase, names in (
        ("supervised", metrics.SUPERVISED),
        ("reinforcement", metrics.REINFORCEMENT),
        ("evaluation", metrics.EVALUATION),
    ):
        found = [record for record in records if record["phase"] == phase]
        assert found and all(set(names) <= record.keys() for record in found), phase
    config = json.loads((path / "config.json").read_text())
    assert config["algorithm"]["loss_fn"]["function"] == "torchtitan_rl.algorithm.surrogate:ppo"
    assert all(record["mismatch/kl"] <= 1e-6 for record in records if record["phase"] == "reinforcement")
    rollouts = [record for record in attempts.read_rollouts(RunDir(path)) if record["step"] == 1]
    assert len(rollouts) == 16
    for record in rollouts:
        (turn,), (sequence,) = record["turns"], record["sequences"]
        assert turn["prompt"] == record["prompt"]
        assert re.sub("<(eos|pad|unk)>", "", turn["text"]) == record["text"]  # a turn has special tokens too
        sampled = [x for x, mask in zip(sequence["policy_logprobs"], sequence["loss_mask"], strict=True) if mask]
        assert sampled == pytest.approx(turn["logprobs"], abs=1e-5)  # both sides are of one policy version
        assert record["seconds"].keys() == {"play", "reward"} and record["answer"]
    assert [record["version"] for record in attempts.read_versions(RunDir(path))][-2:] == [3, 4]
    assert {file.suffix for name in ("rollouts", "ledger", "versions") for file in (path / name).iterdir()} == {
        ".parquet"
    }
    assert (path / "checkpoints" / "step-2" / "COMPLETE").exists()
    assert (path / "curve.png").stat().st_size > 1000
    logs = {log.name: log.read_text().splitlines() for log in (path / "logs").iterdir()}
    assert {"policy-0.log", "generator-0-0.log"} <= logs.keys()
    assert "policy" in logs["policy-0.log"][0] and "pid" in logs["policy-0.log"][0]


@pytest.mark.slow  # the faster variant is in test_backends_agree.py, whose second run has the other backend
def test_the_same_seed_gives_the_same_bytes(short_run, tmp_path):
    result = run("train", QUICKSTART, *SHORT, "--output-dir", str(tmp_path / "second"))
    assert result.returncode == 0, result.stderr
    columns = ("reward/", "loss/", "eval/", "optim/", "policy/", "mismatch/")
    first, second = (
        [{k: repr(v) for k, v in r.items() if k.startswith(columns)} for r in lines(p)]
        for p in (short_run.path, tmp_path / "second")
    )
    assert first == second


@pytest.mark.whole
def test_a_checkpoint_evaluates_and_samples(here, short_run, fork_server, tmp_path):
    checkpoint, local = str(short_run.path / "checkpoints" / "step-2"), ["--backend", "local"]
    result = here(
        "eval", QUICKSTART, *SHORT, *local, "--checkpoint", checkpoint, "--output-dir", str(tmp_path / "eval")
    )
    assert result.returncode == 0, result.stderr
    after = [r for r in lines(short_run.path) if r["phase"] == "evaluation" and r["eval/split"] == "validation"][-1]
    assert f"step 2: validation accuracy {after['eval/accuracy']:.4f}" in result.stdout
    assert {record["step"] for record in lines(tmp_path / "eval")} == {2}
    flags = ["--max-tokens", "4", "--temperature", "1", "--top-p", "0.9", "--output-dir", str(tmp_path / "sample")]
    with in_use(fork_server):
        result = run("sample", "--checkpoint", checkpoint, "--prompt", "szyci=", *flags)
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 1, result.stdout
    assert f"step 2 of quickstart; {tmp_path / 'sample'}" in result.stderr
    told = json.loads((tmp_path / "sample" / "sample.json").read_text())
    assert told["step"] == 2 and told["text"] == result.stdout.rstrip("\n") and told["params"]["top_p"] == 0.9
    assert told["completion"]["filtered"] == "top_p=0.9"


def mistake(result: subprocess.CompletedProcess, *expected: str) -> None:
    """A short message that names what is wrong, and no traceback."""
    message = result.stderr[result.stderr.index("error: ") :]
    assert result.returncode == 1
    assert "Traceback" not in result.stderr + result.stdout
    assert len(message.strip().splitlines()) <= 3
    for text in expected:
        assert text in message, message


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["train", "configs/quickstrat.py"], ["config='configs/quickstrat.py'", "did you mean configs/quickstart.py?"]),
        (
            ["train", QUICKSTART, "--trainer.optimiser.lr", "1"],
            ["--trainer.optimiser.lr=1", "did you mean --trainer.optimizer.lr?"],
        ),
        (["train", QUICKSTART, "--seed", "abc"], ["--seed=abc", "int"]),
        (
            ["train", QUICKSTART, "--generator.tensor-parallel-degree", "3"],
            ["generator.tensor_parallel_degree=3", "n_heads=4"],
        ),
        (["eval", QUICKSTART, "--checkpoint", "nowhere"], ["checkpoint='nowhere'", "no such directory"]),
        (["train", QUICKSTART, "--model.shape.vocab-size", "32"], ["vocab_size=32", "64 tokens"]),
        (["train", QUICKSTART, "--task.num-validation", "0"], ["task.validation: 0 tasks"]),
        (["train", QUICKSTART, "--sampling.max-tokens", "60"], ["trainer.training.seq_len=64", "76"]),
        (["train", QUICKSTART, "--output-dir", "/proc/nowhere"], ["output_dir='/proc/nowhere'", "cannot be written"]),
    ],
)
def test_mistakes_are_refused_before_anything_starts(here, arguments, expected):
    mistake(here(*arguments), *expected)


def test_a_half_written_checkpoint_is_refused(here, tmp_path):
    (tmp_path / "step-5" / "model").mkdir(parents=True)
    mistake(here("eval", QUICKSTART, "--checkpoint", str(tmp_path / "step-5")), "step-5", "is incomplete")


def test_a_file_without_a_config_is_refused(here, tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    mistake(here("train", str(tmp_path / "empty.py")), "empty.py", "defines no config()")


BAD_REWARD = """
import time
from torchtitan_rl.config import load_config

def reward(task, completions):
    {body}

def config():
    config = load_config({quickstart!r})
    config.task.reward = reward
    config.controller.reward_timeout_s = 1.0
    return config
"""


def with_reward(tmp_path: Path, body: str) -> list[str]:
    """Arguments of a short local run with such a reward."""
    file = tmp_path / "bad.py"
    file.write_text(BAD_REWARD.format(quickstart=QUICKSTART, body=body))
    return ["train", str(file), *SHORT, "--backend", "local", "--output-dir", str(tmp_path / "run")]


# NaN, None, infinity and wrong counts: tests/unit/tasks/test_family.py
def test_a_bad_reward_function_ends_the_run_with_its_name(here, tmp_path):
    mistake(here(*with_reward(tmp_path, "raise KeyError('boom')")), "bad:reward", "raised KeyError: 'boom'")


@pytest.mark.slow  # of a process of its own, which ends although the reward does not
def test_so_does_a_reward_function_that_hangs(tmp_path):
    mistake(run(*with_reward(tmp_path, "time.sleep(1000)")), "bad:reward", "gave no answer")


def test_a_prompt_longer_than_its_limit_is_refused(loop, tmp_path):
    from torchtitan_rl.train.controller import Controller

    async def train():
        config = small_config(tmp_path / "run", sampling__max_prompt_tokens=5)
        async with await Controller.launch(config, backend="local") as controller:
            await controller.train()

    with pytest.raises(ValueError, match="its prompt has 7 tokens, sampling.max_prompt_tokens=5; raise it"):
        loop.run_until_complete(train())


@pytest.mark.parametrize("generator_tp", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.whole
def test_ctrl_c_ends_a_run_within_five_seconds_and_says_where(tmp_path, generator_tp):
    process = subprocess.Popen(
        [
            *COMMAND,
            "train",
            QUICKSTART,
            *SHORT,
            "--supervised.num-steps",
            "5000",
            "--output-dir",
            str(tmp_path / "run"),
            "--generator.tensor-parallel-degree",
            generator_tp,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics_file.exists() and metrics_file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    _, stderr = process.communicate(timeout=5)
    assert process.returncode == 130
    assert "interrupted in the supervised phase" in stderr and "Traceback" not in stderr, stderr
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive


def test_dry_run_and_show_need_neither_vllm_nor_monarch():
    configs = [f"configs/{name}.py" for name in ("qwen3_0_6b_gsm8k", "reasoning_gym", "quickstart")]
    script = (
        "import sys; from torchtitan_rl.cli.main import main; "
        f"code = any(main(['train', config, '--dry-run']) or main(['show', config]) for config in {configs}); "
        "print([m for m in ('vllm', 'monarch') if m in sys.modules]); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert all(f"{config}: valid; nothing was started" in result.stdout for config in configs)
    assert result.stdout.strip().endswith("[]")
