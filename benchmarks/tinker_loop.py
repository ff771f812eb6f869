"""The loops of docs/tinker_client.py through the in-process clients and through the Tinker server, in turn.

    .venv/bin/python -m benchmarks.tinker_loop [--warm-steps 300] [--rl-steps 160]

Both train all parameters of the quickstart's model, on the same tasks, with the same learning rates. Prints one line of
JSON: per kind the accuracies and the seconds of each phase, start-up left out, and the ratios of the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent


def example():
    """docs/tinker_client.py, as a module."""
    spec = importlib.util.spec_from_file_location("tinker_client", ROOT / "docs" / "tinker_client.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def in_process(directory: str, warm_steps: int, rl_steps: int) -> dict[str, float]:
    """The loops through `TrainingClient` and `SamplingClient`."""
    from torchtitan_rl import Controller
    from torchtitan_rl.config.load import load_config

    config, loops = load_config(str(ROOT / "configs" / "quickstart.py")), example()
    config.output_dir = directory
    async with await Controller.launch(config) as controller:
        began = time.monotonic()
        await supervised(controller, loops, warm_steps)
        warm, warm_s = await accuracy(controller, loops), time.monotonic() - began
        await reinforcement(controller, loops, rl_steps)
        seconds = time.monotonic() - began - warm_s
        return {"warm": warm, "reinforced": await accuracy(controller, loops), "warm_s": warm_s, "rl_s": seconds}


async def step(controller, data, loss, lr: float) -> None:
    from torchtitan_rl.types import OptimParams

    gradient = controller.trainer.forward_backward(data, loss, temperature=1.0)
    params = OptimParams(lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    stepped = controller.trainer.optim_step(params)
    await gradient, await stepped


async def supervised(controller, loops, steps: int) -> None:
    from torchtitan_rl.algorithm.losses import cross_entropy
    from torchtitan_rl.types import Datum

    rng, tokenizer = random.Random(0), controller.tokenizer
    for at in range(steps):
        data = []
        for letters in loops.words(rng, loops.WARM_BATCH):
            prompt = tokenizer.encode(f"{letters}=")
            tokens = prompt + tokenizer.encode(loops.wrong_order(rng, letters)) + [tokenizer.eos_token_id]
            weights_T = torch.zeros(len(tokens) - 1)
            weights_T[len(prompt) - 1 :] = 1.0 / (loops.WARM_BATCH * 6)
            whole = torch.tensor(tokens)
            data.append(Datum(tokens=whole[:-1], target_tokens=whole[1:], loss_inputs={"token_weights": weights_T}))
        lr = loops.WARM_LR * min(1.0, (at + 1) / 20) * 0.5 * (1 + math.cos(math.pi * at / steps))
        await step(controller, data, cross_entropy, lr)


async def rollouts(controller, loops, tasks: list[str], n: int, temperature: float) -> list:
    from torchtitan_rl.types import SamplingParams

    await controller.publish()
    prompts = [controller.tokenizer.encode(f"{letters}=") for letters in tasks]
    completions = await asyncio.gather(
        *(
            controller.generator.sample(
                prompt,
                SamplingParams(max_tokens=loops.MAX_TOKENS, temperature=temperature, seed=random.getrandbits(60)),
            )
            for prompt in prompts
            for _ in range(n)
        )
    )
    return [(letters, prompts[i], completions[i * n : (i + 1) * n]) for i, letters in enumerate(tasks)]


async def reinforcement(controller, loops, steps: int) -> None:
    from torchtitan_rl.algorithm.losses import ppo
    from torchtitan_rl.types import Datum

    rng = random.Random(1)
    for at in range(steps):
        groups = await rollouts(controller, loops, loops.words(rng, loops.TASKS), loops.GROUP, 1.0)
        data, num_tokens = [], sum(len(one.tokens) for *_, group in groups for one in group)
        for letters, prompt, group in groups:
            texts = [loops.text_of(controller.tokenizer, one.tokens) for one in group]
            rewards = torch.tensor([loops.reward(letters, text) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for completion, advantage in zip(group, advantages.tolist()):
                whole, before = torch.tensor(prompt + completion.tokens), [0.0] * (len(prompt) - 1)
                ones_T = torch.ones(len(whole) - 1)
                inputs = {
                    "token_weights": ones_T,
                    "loss_mask": ones_T,
                    "sampling_logprobs": torch.tensor(before + completion.logprobs),
                    "advantages": torch.tensor(before + [advantage / num_tokens] * len(completion.tokens)),
                }
                data.append(Datum(tokens=whole[:-1], target_tokens=whole[1:], loss_inputs=inputs))
        await step(controller, data, ppo, loops.LR * min(1.0, (at + 1) / 5) * (1 - 0.9 * at / steps))


async def accuracy(controller, loops, number: int = 256) -> float:
    tasks = loops.words(random.Random(2), number, held_out=True)
    played = await rollouts(controller, loops, tasks, 1, 0.0)
    texts = [(letters, loops.text_of(controller.tokenizer, one.tokens)) for letters, _, (one,) in played]
    return sum(text == "".join(sorted(letters)) for letters, text in texts) / number


def through_server(directory: str, warm_steps: int, rl_steps: int) -> dict[str, float]:
    """The loops through the SDK, in a process of its own, against a server in processes of its own."""
    config, log = str(ROOT / "configs" / "quickstart.py"), Path(directory) / "server.log"
    command = [sys.executable, "-m", "torchtitan_rl.cli", "serve-tinker", config, "--lora-rank", "0", "--port", "0"]
    with open(log, "w") as file:
        server = subprocess.Popen([*command, "--max-restarts", "0", "--output-dir", f"{directory}/run"], stderr=file)
    try:
        while "TINKER_BASE_URL=" not in log.read_text():
            if server.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
        url = log.read_text().partition("TINKER_BASE_URL=")[2].split()[0]
        out = subprocess.run(
            [sys.executable, str(ROOT / "docs" / "tinker_client.py"), "--warm-steps", str(warm_steps)]
            + ["--rl-steps", str(rl_steps)],
            env=os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local"},
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        server.terminate()
        server.wait(30)
    figures = json.loads(out.stdout)
    report = SimpleNamespace(**{name.replace(" ", "_").replace(",", ""): value for name, value in figures.items()})
    return {
        "warm": report.accuracy_after_the_warm_start,
        "reinforced": report.accuracy_after_reinforcement,
        "warm_s": report.warm_start_s,
        "rl_s": report.reinforcement_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--rl-steps", type=int, default=160)
    parser.add_argument("--in-process", default="", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(json.dumps(asyncio.run(in_process(args.in_process, args.warm_steps, args.rl_steps))), flush=True)
        os._exit(0)  # threads of Monarch
    with tempfile.TemporaryDirectory() as directory:
        steps = ["--warm-steps", str(args.warm_steps), "--rl-steps", str(args.rl_steps)]
        command = [sys.executable, "-m", "benchmarks.tinker_loop", "--in-process", f"{directory}/in_process", *steps]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        clients = json.loads(out.strip().splitlines()[-1])
        server = through_server(directory, args.warm_steps, args.rl_steps)
    ratios = {name: round(server[name] / clients[name], 3) for name in ("warm_s", "rl_s")}
    print(json.dumps({"clients": clients, "server": server, "ratios": ratios}))


if __name__ == "__main__":
    main()
