"""What a new user does in a first afternoon, with files of the user's own: data, rewards, a loss, an estimator, a run,
and a look at its rollouts."""

import asyncio
import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch

from tests.integration.conftest import SHORT
from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import SamplingParams

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
WEIGHTS = {"exact": 1.0, "letters": 0.5, "service": 0.25}

MY_REWARDS = """
import json
import os
import urllib.request

def exact(task, completions):
    return [float(completion == task.answer) for completion in completions]

def letters(task, completions):
    return [len(set(completion) & set(task.answer)) / len(task.answer) for completion in completions]

def service(task, completions):
    asked = urllib.request.Request(os.environ["MY_SERVICE"], data=json.dumps(completions).encode())
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)
"""

MY_CONFIG = """
import torch

import torchtitan_rl.config as rl
from my_rewards import exact, letters, service
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.tasks.limited import Limited
from torchtitan_rl.tasks.rewards import Rewards

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=64, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=32, hidden_dim=128, max_seq_len=512
)

def leave_one_out(rewards):
    rewards = rewards.tolist()
    return [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]

def early_tokens_first(inputs):
    early = inputs.position < 4
    term = inputs.policy_logprobs * inputs.advantages * torch.where(early, 1.0, 0.5)
    num_early = (early & (inputs.loss_mask > 0)).sum().float()
    return -(inputs.token_weights * torch.where(inputs.loss_mask > 0, term, 0.0)).sum(), {"mine/early_frac": num_early}

def config():
    limited = Limited(service, concurrency=4, retries=2, timeout_s=20, wait_s=0.02)
    return rl.RunConfig(
        name="afternoon",
        task=Dataset.Config(
            train="task.jsonl", prompt="word", answer="sorted", demonstration="sorted", system="Sort the letters.",
            validation_fraction=0.2, test_fraction=0.2,
            reward=Rewards({"exact": (exact, 1.0), "letters": (letters, 0.5), "service": (limited, 0.25)}),
        ),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(num_steps=40, batch_size=16, lr=1e-2),
        algorithm=presets.grpo(
            advantage_fn=leave_one_out, loss_fn=early_tokens_first, tasks_per_step=4, group_size=4
        ),
        controller=rl.ControllerConfig(num_steps=3, eval_every=2, eval_tasks=8, test_tasks=8, correct_reward=0.5),
        sampling=rl.SamplingConfig(max_prompt_tokens=40, max_tokens=8),
        generator=rl.GeneratorConfig(dtype="float32", kv_cache_gib=0.1, max_num_seqs=64, max_num_batched_tokens=64),
    )
"""


class Service(BaseHTTPRequestHandler):
    """Half for a completion without letters, one for letters only; every tenth call fails."""

    def do_POST(self):
        completions = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.calls += 1
            fails = self.server.calls % 10 == 0
        self.send_response(500 if fails else 200)
        self.end_headers()
        if not fails:
            self.wfile.write(json.dumps([1.0 if text.isalpha() else 0.5 for text in completions]).encode())

    def log_message(self, *args):
        """Says nothing."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The user's directory, which is the present one, with the user's files."""
    path, before = tmp_path_factory.mktemp("afternoon"), (os.getcwd(), list(sys.path))
    words = {"".join(random.Random(seed).sample("abcdefgh", 4)) for seed in range(60)}
    rows = [{"word": word, "sorted": "".join(sorted(word))} for word in sorted(words)]
    (path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "my_rewards.py").write_text(MY_REWARDS)
    (path / "my_config.py").write_text(MY_CONFIG)
    os.chdir(path)
    yield path
    os.chdir(before[0])
    sys.path[:] = before[1]
    sys.modules.pop("my_rewards", None)


@pytest.fixture(scope="module")
def service():
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.calls, server.lock = 0, threading.Lock()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ["MY_SERVICE"] = f"http://127.0.0.1:{server.server_address[1]}/judge"
        yield server
        del os.environ["MY_SERVICE"]
        server.shutdown()


@pytest.fixture(scope="module")
def run(loop, directory, service):
    """The first run: its directory, lines of metrics, rollouts, log, parameters, and how many calls of the service
    failed."""

    async def train():
        config = load_config("my_config.py")
        config.output_dir = "run"
        async with await Controller.launch(config, backend="local") as controller:
            await controller.train()
            return RunDir(directory / "run"), await controller.trainer.parameters()

    run_dir, parameters = loop.run_until_complete(train())
    return SimpleNamespace(
        path=run_dir.path,
        lines=run_dir.read_metrics(),
        rollouts=list(read_rollouts(run_dir)),
        log=(run_dir.path / "logs" / "local-0.log").read_text(),
        parameters=parameters,
        failed=service.calls // 10,
    )


@pytest.fixture(scope="module")
def resumed(loop, run):
    """The run, resumed with nothing left but its last evaluations, which draw samples with top-p."""

    async def train():
        config = load_config("my_config.py")
        config.output_dir = "run"
        apply_overrides(config, ["--controller.pass-at-k", "4", "--controller.eval-sampling.top-p", "1e-6"])
        controller = await Controller.launch(config, backend="local", resume_from="latest")
        return controller, await controller.trainer.parameters(), await controller.train()

    controller, parameters, report = loop.run_until_complete(train())
    lines = controller.run_dir.read_metrics()
    yield SimpleNamespace(controller=controller, lines=lines, parameters=parameters, report=report)
    loop.run_until_complete(controller.close())


def of(phase, lines):
    """The lines of a phase, without what a clock measured."""
    clocked = ("time/", "perf/")
    return [{k: v for k, v in line.items() if not k.startswith(clocked)} for line in lines if line["phase"] == phase]


def test_adapters_a_reference_and_an_early_stop_from_the_command_line_alone(here, tmp_path):
    """Before the tests whose local run stays open."""
    flags = ["--trainer.lora.rank", "4", "--roles.reference", "True", "--algorithm.kl-coef", "0.04"]
    stop = ["--controller.num-steps", "6", "--controller.stop.patience", "1"]
    command = ["train", str(ROOT / "configs" / "quickstart.py"), *SHORT, *flags, *stop]
    done = here(*command, "--backend", "local", "--output-dir", str(tmp_path / "lora"))
    assert done.returncode == 0, done.stderr
    assert "stopped early" in done.stdout and "controller.stop.patience=1: " in done.stdout
    lines = RunDir(tmp_path / "lora").read_metrics()
    trained, (ended,) = of("reinforcement", lines), of("stop", lines)
    assert 1 <= len(trained) < 6 and ended["stop/reason"].startswith("controller.stop.patience=1: ")
    assert all("policy/reference_kl" in line for line in trained)
    checkpoint = tmp_path / "lora" / "checkpoints" / f"step-{len(trained)}"
    assert json.loads((checkpoint / "lora.json").read_text())["rank"] == 4
    assert (checkpoint / "adapter" / "adapter_config.json").exists()


def test_prompts_are_the_rows_with_the_system_prompt(run, directory):
    words = {json.loads(line)["word"]: json.loads(line) for line in (directory / "task.jsonl").open()}
    assert len(run.rollouts) == 3 * 4 * 4
    for record in run.rollouts:
        system, user = json.loads(record["prompt"])
        assert system == {"role": "system", "content": "Sort the letters."}
        assert words[user["content"]]["sorted"] == record["answer"]
        shown = f"<|system|>Sort the letters.<|end|><|user|>{user['content']}<|end|><|assistant|>"
        assert [turn["prompt"] for turn in record["turns"]] == [shown]


def test_a_reward_is_the_weighted_sum_and_every_part_has_a_curve(run):
    for record in run.rollouts:
        assert record["reward"] == pytest.approx(sum(WEIGHTS[name] * x for name, x in record["reward_parts"].items()))
    for line in of("reinforcement", run.lines):
        of_step = [record for record in run.rollouts if record["step"] == line["step"]]
        for name in WEIGHTS:
            mean = sum(record["reward_parts"][name] for record in of_step) / len(of_step)
            assert line[f"reward/part_{name}_mean"] == pytest.approx(mean)
    assert len({record["reward_parts"]["letters"] for record in run.rollouts}) > 2
    evaluations = of("evaluation", run.lines)
    assert all(f"eval/reward_part_{name}_mean" in line for line in evaluations for name in WEIGHTS)


def test_a_service_that_fails_one_call_in_ten_costs_no_rollout_and_is_in_the_log(run):
    assert run.failed >= 2
    said = [line for line in run.log.splitlines() if "of a reward: " in line]
    assert len(said) == len(str(run.failed))  # the 1st, 10th, 100th ... retry
    assert "WARNING" in said[0] and "retry 1 of a reward: reward=my_rewards:service: raised HTTPError" in said[0]
    assert "HTTP Error 500" in said[0] and "(my_rewards.py:" in said[0]
    assert all("service" in record["reward_parts"] for record in run.rollouts)
    assert not [name for line in run.lines for name in line if name.startswith("failure/")]


def test_advantages_are_those_of_the_estimator_that_returns_a_list(run):
    groups = {record["group_id"]: [] for record in run.rollouts}
    for record in run.rollouts:
        groups[record["group_id"]].append(record)
    assert len(groups) == 12
    for group in groups.values():
        rewards = [record["reward"] for record in group]
        for record in group:
            others = (sum(rewards) - record["reward"]) / 3
            assert record["advantage"] == pytest.approx(record["reward"] - others, abs=1e-6)
    assert any(abs(record["advantage"]) > 0.1 for record in run.rollouts)


def test_the_loss_saw_the_position_of_each_token_in_its_completion(run):
    for line in of("reinforcement", run.lines):
        lengths = [sum(record["num_tokens"]) for record in run.rollouts if record["step"] == line["step"]]
        assert line["mine/early_frac"] == pytest.approx(sum(min(n, 4) for n in lengths) / sum(lengths))
        assert 0 < line["mine/early_frac"] < 1


def test_the_worst_group_in_pandas(run):
    table = pandas.read_parquet(run.path / "rollouts")
    assert len(table) == len(run.rollouts)
    worst = table[table.group_id == table.groupby("group_id").reward.mean().idxmin()]
    means = {}
    for record in run.rollouts:
        means[record["group_id"]] = means.get(record["group_id"], 0.0) + record["reward"] / 4
    assert worst.reward.mean() == pytest.approx(min(means.values())) and len(worst) == 4
    parts = pandas.DataFrame(worst.reward_parts.map(dict).tolist())
    assert (parts @ pandas.Series(WEIGHTS)).tolist() == pytest.approx(worst.reward.tolist())
    seen = pandas.DataFrame(read_rollouts(RunDir(run.path)))
    assert seen.reward.tolist() == table.reward.tolist() and isinstance(seen.reward_parts[0], dict)


def test_a_resumed_evaluation_says_what_the_run_said(run, resumed):
    assert resumed.parameters.keys() == run.parameters.keys()
    for name, tensor in run.parameters.items():
        assert torch.equal(resumed.parameters[name], tensor), name
    before = of("evaluation", run.lines)
    assert [(line["step"], line["eval/split"]) for line in before[-2:]] == [(3, "validation"), (3, "test")]
    assert of("evaluation", resumed.lines) == before
    assert of("reinforcement", resumed.lines) == of("reinforcement", run.lines)
    assert resumed.report["test"].accuracy == before[-1]["eval/accuracy"]


def test_top_p_acts_on_the_samples_of_an_evaluation(loop, resumed):
    narrow = loop.run_until_complete(resumed.controller.evaluate("validation", pass_at_k=4))
    assert 0 < narrow.accuracy < 1  # or what follows would be true of a constant
    assert narrow.avg_at_n == narrow.pass_at_k == narrow.accuracy  # samples of the likeliest token alone
    resumed.controller.config.controller.eval_sampling.top_p = 1.0
    whole = loop.run_until_complete(resumed.controller.evaluate("validation", pass_at_k=4))
    assert whole.accuracy == narrow.accuracy and whole.avg_at_n != narrow.avg_at_n


def test_a_prompt_that_does_not_fit_into_an_iteration_waits_for_the_next(loop, resumed):
    generator = resumed.controller.generator

    def ask(i):  # 64 tokens are an iteration, so a second of these prompts would be cut
        return generator.sample([5 + i] * 40, SamplingParams(max_tokens=8, seed=i))

    async def together():
        return await asyncio.gather(*map(ask, range(5)))

    answers = loop.run_until_complete(together())
    assert [answer.tokens for answer in answers] == [loop.run_until_complete(ask(i)).tokens for i in range(5)]
