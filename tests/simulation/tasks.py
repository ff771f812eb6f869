"""What the simulated runs play: a task family with environments that take virtual time, its tokenizer, and the config
and the faults of a seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.tasks.env import Env, Step
from torchtitan_rl.tasks.family import stable_hash
from torchtitan_rl.types import Task

__all__ = ["BATCHES", "Fault", "Play", "Tokenizer", "config_of", "faults_of"]

BATCHES = 20
_SHAPE = rl.Qwen3Shape(vocab_size=64, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=32, hidden_dim=32)


class Tokenizer:
    """Character tokens: code point less 48, from `0` to `k`; 60 is the end of sequence."""

    eos_token_id = pad_token_id = 60
    chat_template = None
    all_special_ids = (60,)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) - 48 for character in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 48) for token in tokens if token < 60)


class Play:
    """Tasks without a meaning: prompts are numbers, rewards a hash of the text. `seed` varies the delays."""

    name = "play"

    @dataclass(kw_only=True, slots=True)
    class Config:
        seed: int = 0
        num_train: int | None = None
        """Tasks of the train split; None: without end."""
        max_turns: int = 1
        """Most turns of an environment; 1: no environment."""
        one_in_fails: int = 0
        """One in so many answers of environments is an error; 0: none."""

        def build(self) -> Play:
            return Play(self)

    def __init__(self, config: Play.Config) -> None:
        self.config = config
        if config.max_turns > 1:
            self.environment = lambda task: PlayEnv(config, task)

    def num_tasks(self, split: str) -> int | None:
        return self.config.num_train if split == "train" else 2

    def task(self, split: str, index: int) -> Task:
        return Task(id=f"play/{split}/{index}", prompt=str(stable_hash(split, index) % 10**6))

    async def reward(self, task: Task, completions: list[str]) -> list[float]:
        await asyncio.sleep(stable_hash(self.config.seed, task.id) % 100 / 50)
        return [stable_hash(task.id, text) % 3 / 2 for text in completions]


class PlayEnv(Env):
    """Ends after a number of turns that follows from the task. Each answer takes up to 2.5 s, one in ten up to 25 s."""

    def __init__(self, config: Play.Config, task: Task) -> None:
        self.config, self.task, self.turn = config, task, 0
        self.num_turns = 1 + stable_hash(config.seed, task.id, "turns") % config.max_turns

    async def reset(self) -> str:
        return self.task.prompt

    async def step(self, text: str) -> Step:
        drawn = stable_hash(self.config.seed, self.task.id, self.turn, text)
        self.turn += 1
        await asyncio.sleep(drawn % 100 / (4 if drawn % 1000 < 100 else 40))
        if self.config.one_in_fails and drawn // 1000 % self.config.one_in_fails == 0:
            raise RuntimeError("the tool is out of order")
        reward, done = drawn % 3 / 2, self.turn == self.num_turns
        return Step(reward=reward, done=done) if done else Step(observation=":", reward=reward)


@dataclass(kw_only=True, slots=True)
class Fault:
    """Something that goes wrong once the run has made `at` requests and `delay` virtual seconds have passed."""

    kind: str
    at: int
    delay: float = 0.0
    replica: int = 0
    seconds: float = 0.0
    """How long a replica hangs."""


_KINDS = {
    "replica dies": 3,
    "replica hangs": 2,
    "replica answers late": 2,
    "replica is slow": 2,
    "controller is killed": 4,
    "trainer dies": 1,
    "fetch fails": 1,
    "fetch is lost": 1,
    "load fails": 1,
    "replacement does not start": 1,
    "checkpoint is not written": 1,
    "step is skipped": 2,
    "engine refuses requests": 1,
    "environment fails": 1,
}
"""Kind of a fault -> its weight among the kinds."""

FOREVER_S = 10_000.0


def config_of(seed: int, output_dir: Path) -> rl.RunConfig:
    """The config of a seed: lag, filters, turns, batches and minibatches are drawn."""
    draw = random.Random(f"config/{seed}")
    lag, tasks, group = draw.randrange(4), draw.choice([2, 2, 2, 3]), draw.choice([2, 2, 2, 3])
    zero_variance = draw.random() < 0.4
    algorithm = presets.grpo(
        tasks_per_step=tasks,
        group_size=group,
        max_policy_lag=lag,
        batch_order="finished" if lag >= 2 and random.Random(f"order/{seed}").random() < 0.4 else "slots",
        tasks_per_minibatch=draw.choice([0, 0, 0, 1]),
        filters=rl.FilterConfig(zero_variance=zero_variance, max_resamples=draw.choice([1, 3]) * zero_variance),
        on_rollout_failure=draw.choice(["retry", "drop_group"]),
        rollout_retries=1,
        max_failed_frac=0.9,
    )
    task = Play.Config(
        seed=seed,
        num_train=draw.choice([None, 13]),
        max_turns=draw.choice([1, 1, 1, 3]),
        one_in_fails=23 * ("environment fails" in _kinds_of(seed)),
    )
    config = rl.RunConfig(
        name="simulated",
        task=task,
        model=rl.ModelConfig(assets="chars", shape=_SHAPE),
        algorithm=algorithm,
        controller=rl.ControllerConfig(
            num_steps=BATCHES * algorithm.steps_per_batch,
            eval_every=draw.choice([0, 7 * algorithm.steps_per_batch]),
            eval_tasks=1,
            test_tasks=1,
            pass_at_k=0,
            max_skipped_steps=5,
            checkpoint_every=draw.choice([4, 7]) * algorithm.steps_per_batch,
            checkpoint_export="none",
            keep_last=2,
            record_tokens=False,
            sample_timeout_s=40.0,
            call_timeout_s=60.0,
        ),
        sampling=rl.SamplingConfig(max_prompt_tokens=8, max_tokens=6, max_rollout_tokens=60, max_turns=4),
        generator=rl.GeneratorConfig(
            num_replicas=3,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=64,
            max_replica_restarts=draw.choice([30, 30, 30, 0]),
            probe_every_s=20.0,
            hang_timeout_s=15.0,
        ),
        seed=seed,
        record=rl.RecordConfig(health=False, diagnose=False),  # who watches lives by the real clock
        output_dir=str(output_dir),
    )
    config.trainer.max_tokens_per_microbatch = 64
    config.trainer.training.seq_len = 64
    return config


def faults_of(seed: int, config: rl.RunConfig) -> list[Fault]:
    """The five faults of a seed, in the order in which they strike."""
    draw, algorithm = random.Random(f"faults/{seed}"), config.algorithm
    requests = BATCHES * algorithm.tasks_per_step * algorithm.group_size
    faults = []
    for kind in _kinds_of(seed):
        fault = Fault(kind=kind, at=draw.randrange(requests), delay=draw.choice([0.0, draw.uniform(0, 6)]))
        fault.replica = draw.randrange(3)
        late = {"replica hangs": FOREVER_S, "replica answers late": draw.uniform(41, 60)}
        fault.seconds = late.get(kind, draw.uniform(3, 20))
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at)


def _kinds_of(seed: int) -> list[str]:
    return random.Random(f"kinds/{seed}").choices(list(_KINDS), list(_KINDS.values()), k=5)
