"""An OpenEnv environment on the tiny chat model: environments/last_letter_server.py, as its package would have it.

The environment's server runs beside the run. It gives two words, one after the other, and rewards the last letter of
each; an agent makes a conversation of its observations and meets the policy at the gateway (docs/environments.md).
The warm start shows both ways to answer: three replies in ten are the last letter, the others the first letter, which
is wrong. That the last letter pays is learned from the reward alone.

Differs from the quickstart:
- task: OpenEnv.Config(demonstrate=demonstrate), not LetterSort.Config()
- model.assets: "bytes", not "chars"
- model.shape.vocab_size: 264, not 64
- supervised.num_steps: 200, not 300
- algorithm.workflow: External(agent=play(server="last_letter_server:app", say=say, act=act), timeout_s=120.0,
  imitated=demonstrated), not None
- algorithm.tasks_per_step: 16, not 32
- controller.num_steps: 20, not 160
- controller.eval_tasks: 64, not 256
- controller.test_tasks: 128, not 512
- controller.pass_at_k: 0, not 8
- sampling.max_tokens: 4, not 12
- trainer.optimizer.lr: 0.0005, not 0.001
- generator.max_num_seqs: 128, not 512
"""

import random
from pathlib import Path

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.environment import add_to_path
from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.tasks.env import Env, Step
from torchtitan_rl.tasks.openenv import OpenEnv

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)
add_to_path(str(Path(__file__).parents[1] / "environments"))  # an environment that is installed needs no such line


def say(observation):
    return observation["word"]


def act(reply):
    return {"letter": reply}


def words(seed):
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh", k=4)) for _ in range(2)]


def demonstrate(seed, rng):
    return [word[-1] if rng.random() < 0.3 else word[0] for word in words(seed)]


class Words(Env):
    """The words that the server would give, for demonstrations: in the process, without requests."""

    def __init__(self, task):
        self.words = words(task.answer)

    async def reset(self):
        return [{"role": "user", "content": self.words.pop(0)}]

    async def step(self, text):
        return Step(observation=await self.reset()) if self.words else Step(done=True)


async def demonstrated(task, policy, *, rollout_id, seed):
    limits = Limits(max_turns=2, max_tokens=64, timeout_s=60, step_timeout_s=30)
    return await multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=Words(task), limits=limits)


def config() -> rl.RunConfig:
    algorithm = presets.grpo(
        tasks_per_step=16,
        reduction=reductions.token_mean,
        schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
    )
    algorithm.workflow = external(
        OpenEnv.agent("last_letter_server:app", say=say, act=act), timeout_s=120.0, imitated=demonstrated
    )
    config = rl.RunConfig(
        name="last_letter_openenv",
        task=OpenEnv.Config(demonstrate=demonstrate),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=200,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=algorithm,
        controller=rl.ControllerConfig(num_steps=20, eval_every=20, eval_tasks=64, test_tasks=128, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=16, max_tokens=4),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 64
    return config
