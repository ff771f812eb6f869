"""An agent of one's own: the task of tiny_chat, played by a function that knows OpenAI's SDK.

The agent gives the policy the problem and the calculator, answers calls, and returns the reward. The controller opens a
gateway for it (docs/gateway.md). Everything else is as in configs/tiny_chat.py, and so is what is learned.
Demonstrations are played in the family's own environment, which has the same tokens and no requests.

Differs from the quickstart:
- task: Calculator.Config(min_digits=1, max_digits=2, chat=True), not LetterSort.Config()
- model.assets: "bytes", not "chars"
- model.shape.vocab_size: 264, not 64
- supervised.num_steps: 450, not 300
- algorithm.workflow: External(agent=agent, imitated=demonstrated), not None
- controller.num_steps: 60, not 160
- sampling.max_prompt_tokens: 32, not 16; the tool's line 19, the problem 8
- sampling.max_tokens: 16, not 12
- sampling.max_turns: 4, not 8; in-process only, the agent counts its own
- sampling.max_rollout_tokens: 80, not 0; prompt 28, call 7, its value 8, answer 5: room for two more calls
- trainer.optimizer.lr: 0.0005, not 0.001
- trainer.training.seq_len: 128, not 64
- generator.max_model_len: 128, not 64
- generator.max_num_seqs: 128, not 512; as many prompts as one iteration of the engine can read whole
"""

import functools
import sys

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.tasks.calculator import TOOLS, Calculator, CalculatorEnv, calculate

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)


@functools.cache
def client(app):
    """One client for all attempts, because a new one takes longer than a request; and, as it is in the process of the
    gateway, one without sockets. An agent elsewhere leaves `http_client` out."""
    import openai

    built_on = sys.modules[openai.DefaultAsyncHttpxClient.send.__module__.partition(".")[0]]  # httpx or httpx2
    http = built_on.AsyncClient(transport=built_on.ASGITransport(app=app))
    return openai.AsyncOpenAI(base_url="http://gateway", api_key="of the session", http_client=http)


async def agent(task, endpoint):
    sdk = client(endpoint.app).copy(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages, earned = list(task.prompt), 0.0
    for _ in range(4):
        answer = await sdk.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS, stop="]")
        reply = answer.choices[0].message
        if not reply.content.startswith("["):
            return 1.0 if reply.content.strip() == task.answer else earned
        value = calculate(reply.content[1:])
        earned = 0.2 if value == task.answer else earned
        messages += [reply, {"role": "tool", "tool_call_id": "0", "content": value}]
    return earned


async def demonstrated(task, policy, *, rollout_id, seed):
    limits = Limits(max_turns=4, max_tokens=80, timeout_s=60, step_timeout_s=30)
    env = CalculatorEnv(task, call_reward=0.2)
    return await multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=env, limits=limits)


def config() -> rl.RunConfig:
    algorithm = presets.grpo(
        tasks_per_step=32,
        reduction=reductions.token_mean,
        schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
    )
    algorithm.workflow = external(agent, imitated=demonstrated)
    config = rl.RunConfig(
        name="calculator_agent",
        task=Calculator.Config(min_digits=1, max_digits=2, chat=True, tool_demonstrations=0.3),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=450,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=algorithm,
        controller=rl.ControllerConfig(num_steps=60, eval_every=20, eval_tasks=256, test_tasks=512, pass_at_k=8),
        sampling=rl.SamplingConfig(max_prompt_tokens=32, max_tokens=16, max_turns=4, max_rollout_tokens=80),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 128
    return config
