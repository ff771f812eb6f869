"""An agent with tools: OpenAI's SDK alone, a tool of one argument, calls as the SDK has them.

The problems are those of tiny_chat. The agent offers a tool; vLLM's parser `pythonic` finds the call in what the policy
said; the agent runs the tool and sends its result back. The agent is written for any server of OpenAI's endpoints.
The warm start shows both ways to answer: three demonstrations in ten call the tool and copy its result, the others
repeat the problem's first number, which is wrong. That calling pays is learned from the reward alone.

Differs from the quickstart:
- task: Tools.Config(min_digits=1, max_digits=2, chat=True), not LetterSort.Config()
- model.assets: "bytes", not "chars"
- model.shape.vocab_size: 264, not 64
- algorithm.workflow: External(agent=agent, tool_parser="pythonic", imitated=demonstrated), not None
- algorithm.tasks_per_step: 16, not 32
- controller.num_steps: 20, not 160
- controller.eval_tasks: 64, not 256
- controller.test_tasks: 128, not 512
- controller.pass_at_k: 0, not 8
- sampling.max_prompt_tokens: 32, not 16
- sampling.max_tokens: 20, not 12; a call 17
- sampling.max_turns: 4, not 8; in-process only, the agent counts its own
- sampling.max_rollout_tokens: 80, not 0; prompt 18, call 17, its value 8, answer 5: room for another call
- trainer.optimizer.lr: 0.0005, not 0.001
- trainer.training.seq_len: 128, not 64
- generator.max_model_len: 128, not 64
- generator.max_num_seqs: 128, not 512
"""

import asyncio
import functools
import json
import re
from dataclasses import dataclass

import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.rollout.external import external
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.tasks.calculator import Calculator, calculate
from torchtitan_rl.tasks.env import Env, Step

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, max_seq_len=512
)
PROBLEM = {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "a+b", "parameters": PROBLEM}}]


@functools.cache
def client(loop):
    """One client for all attempts of an event loop, because a new one takes longer than a request."""
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the session", timeout=120)


async def agent(task, endpoint):
    sdk = client(asyncio.get_running_loop()).copy(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages, earned = list(task.prompt), 0.0
    for _ in range(3):
        answer = await sdk.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
        reply = answer.choices[0].message
        if not reply.tool_calls:
            return 1.0 if (reply.content or "").strip() == task.answer else earned
        messages.append(reply)
        for call in reply.tool_calls:
            value = calculate(str(json.loads(call.function.arguments).get("e")))
            earned = 0.2 if value == task.answer else earned
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return earned


class Tools(Calculator):
    """The calculator's problems; demonstrations call the tool in Python's form."""

    @dataclass(kw_only=True, slots=True)
    class Config(Calculator.Config):
        def build(self):
            return Tools(self)

    def task(self, split, index):
        task = Calculator.task(self, split, index)
        if isinstance(task.demonstration, list) and len(task.demonstration) == 2:
            task.demonstration = [f'[calc(e="{task.demonstration[0][1:-1]}")]', task.demonstration[1]]
        return task


class Called(Env):
    """What the agent does, for demonstrations: in the process, without the endpoint."""

    tools = TOOLS

    def __init__(self, task):
        self.task = task

    async def reset(self):
        return self.task.prompt

    async def step(self, text):
        called = re.fullmatch(r'\[calc\(e="(.*)"\)\]', text)
        if called is None:
            return Step(reward=float(text == self.task.answer), done=True)
        return Step(observation=[{"role": "tool", "content": calculate(called[1])}])


async def demonstrated(task, policy, *, rollout_id, seed):
    limits = Limits(max_turns=4, max_tokens=80, timeout_s=60, step_timeout_s=30)
    return await multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=Called(task), limits=limits)


def config() -> rl.RunConfig:
    algorithm = presets.grpo(
        tasks_per_step=16,
        reduction=reductions.token_mean,
        schedule=rl.ScheduleConfig(decay="linear", warmup_steps=5, final_factor=0.1),
    )
    algorithm.workflow = external(agent, tool_parser="pythonic", imitated=demonstrated)
    config = rl.RunConfig(
        name="calculator_tools",
        task=Tools.Config(min_digits=1, max_digits=2, chat=True, tool_demonstrations=0.3),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(
            num_steps=300,
            batch_size=64,
            lr=3e-3,
            betas=(0.9, 0.99),
            schedule=rl.ScheduleConfig(decay="cosine", warmup_steps=20),
        ),
        algorithm=algorithm,
        controller=rl.ControllerConfig(num_steps=20, eval_every=20, eval_tasks=64, test_tasks=128, pass_at_k=0),
        sampling=rl.SamplingConfig(max_prompt_tokens=32, max_tokens=20, max_turns=4, max_rollout_tokens=80),
        trainer=rl.TrainerConfig(optimizer=rl.AdamWConfig(lr=5e-4, betas=(0.9, 0.99)), max_tokens_per_microbatch=16384),
        generator=rl.GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=128, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len = 128
    return config
