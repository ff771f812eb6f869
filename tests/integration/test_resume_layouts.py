"""A whole run goes on in another layout: its updates on recorded batches agree. An export serves elsewhere.

Run by `pytest -m slow tests/integration/test_resume_layouts.py`; about three minutes.
"""

import asyncio
import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import small_config
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.usefixtures("forked")]
ROOT = Path(__file__).parents[2]
LAYOUTS = {"dp2": (2, 1), "one rank": (1, 1), "tp2": (1, 2)}


def run_config(path, kind, layout, **overrides):
    settings = {"controller__num_steps": 4, "controller__checkpoint_every": 2, "controller__keep_last": -1}
    settings |= {"controller__checkpoint_export": "none"}
    config = small_config(path, **settings | overrides)
    if kind == "critic":
        ppo = load_config(str(ROOT / "configs" / "ppo_critic.py"))
        for name in ("advantage_fn", "gae_lambda", "gae_gamma", "critic_loss_fn", "critic_loss_config"):
            if hasattr(ppo.algorithm, name):
                setattr(config.algorithm, name, getattr(ppo.algorithm, name))
        config.roles.critic = copy.deepcopy(ppo.roles.critic)
    else:
        config.trainer.lora = LoRAConfig(rank=4, alpha=8.0)
    for trainer in [config.trainer, *(role.trainer for role in config.roles.configured().values())]:
        trainer.parallelism.data_parallel_shard_degree, trainer.parallelism.tensor_parallel_degree = LAYOUTS[layout]
    return config


async def update(controller, groups) -> dict[str, torch.Tensor]:
    """What one step on recorded groups adds to every parameter of every role that trains."""
    roles = [controller.role(name) for name in ("policy", "critic") if name in controller.roles]
    before = [await role.parameters() for role in roles]
    await controller.train_on(copy.deepcopy(groups))
    after = [await role.parameters() for role in roles]
    return {
        f"{i}.{name}": after[i][name] - tensor for i in range(len(roles)) for name, tensor in before[i].items()
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["critic", "lora"])
def test_updates_on_recorded_batches_agree_in_whatever_layout_a_run_goes_on(kind, loop, tmp_path):
    recorded = []

    async def begin():
        async with await Controller.launch(run_config(tmp_path / "run", kind, "dp2")) as controller:
            await controller.train()

    async def go_on(layout):
        config = run_config(tmp_path / layout, kind, layout)
        shutil.copytree(tmp_path / "run", tmp_path / layout)
        source = tmp_path / layout / "checkpoints" / "step-2"
        async with await Controller.launch(config, resume_from=str(source)) as controller:
            assert controller.state.step == 2
            if not recorded:
                await controller.publish()
                for _ in range(2):
                    draws = controller.draws.next(config.algorithm.tasks_per_step)
                    recorded.append(await controller.rollouts(draws))
            return [await update(controller, groups) for groups in recorded]

    loop.run_until_complete(begin())
    updates = {layout: loop.run_until_complete(go_on(layout)) for layout in LAYOUTS}
    for layout in ("one rank", "tp2"):
        for one, other in zip(updates["dp2"], updates[layout], strict=True):
            a, b = (torch.cat([tensor.flatten() for tensor in x.values()]).double() for x in (one, other))
            assert a.norm() > 0
            error = ((a - b).norm() / a.norm()).item()
            print(f"{kind}, dp2 against {layout}: {error:.1e}")
            assert error <= 1e-3, (layout, error)


NATIVE = """
import json, sys
from vllm import LLM, SamplingParams
prompts = json.load(open(sys.argv[2]))
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, enable_prefix_caching=False,
          gpu_memory_utilization=0.2)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
print("ANSWERS " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


def test_an_export_gives_transformers_the_same_logits_and_vllm_the_same_greedy_completions(loop, tmp_path):
    from transformers import AutoModelForCausalLM

    config = small_config(tmp_path / "run", supervised__num_steps=20, controller__checkpoint_export="none")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (5 + i % 7,), generator=generator).tolist() for i in range(64)]

    async def run():
        async with await Controller.launch(config) as controller:
            await controller.train()
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            return await asyncio.gather(*(controller.generator.sample(prompt, params) for prompt in prompts))

    ours = loop.run_until_complete(run())
    checkpoint, directory = tmp_path / "run" / "checkpoints" / "step-2", tmp_path / "exported"
    command = [sys.executable, "-m", "torchtitan_rl.cli", "export", str(checkpoint), str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    worst = 0.0
    for prompt, completion in zip(prompts, ours, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + completion.tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        theirs = logprobs.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        worst = max(worst, (theirs - torch.tensor(completion.logprobs)).abs().max().item())
    print(f"largest difference of log-probabilities to transformers: {worst:.1e}")
    assert worst <= 1e-5

    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    arguments = [sys.executable, "-c", NATIVE, str(directory), str(tmp_path / "prompts.json")]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-1000:]
    answers = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("ANSWERS "))[8:])
    assert answers == [completion.tokens for completion in ours]
