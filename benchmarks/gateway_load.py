"""Completions per second through the gateway, against the same completions by the sampling client, in one invocation.

    .venv/bin/python benchmarks/gateway_load.py [--seconds 60] [--connections 64] [--tokens 16] [--blocks 3]

A Qwen3 of 32M random parameters, one generator. Blocks of both kinds alternate. A block of `direct`: so many tasks of
this process ask the client, each for one completion after the other. A block of `gateway`: a process of its own opens
as many connections and asks for `/v1/chat/completions` in bare HTTP. Prints one line of JSON: completions per second by
kind, the median of the ratios of neighbouring blocks, errors, this process's processor milliseconds per completion by
kind, the server's own spans per request, and resident memory after the first and after the last gateway block.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from statistics import median

import psutil

MESSAGES = [{"role": "user", "content": "12+34"}]


async def load(url: str, connections: int, tokens: int, seconds: float) -> dict[str, float]:
    """Requests over so many connections, one at a time on each, for so many seconds."""
    host, port = url.removeprefix("http://").split(":")
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content
    end, counts = time.monotonic() + seconds, {"completions": 0, "errors": 0}

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        while time.monotonic() < end:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            answer_body = await reader.readexactly(int(length))
            right = answer.startswith(b"HTTP/1.1 200") and f'"completion_tokens": {tokens}'.encode() in answer_body
            counts["completions" if right else "errors"] += 1
        writer.close()

    began = time.monotonic()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return counts | {"seconds": time.monotonic() - began}


async def direct(client, prompt: list[int], connections: int, tokens: int, seconds: float) -> dict[str, float]:
    from torchtitan_rl.types import SamplingParams

    end, counts = time.monotonic() + seconds, {"completions": 0, "errors": 0}

    async def task(number: int) -> None:
        seed = number
        while time.monotonic() < end:
            seed += connections
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
            completion = await client.sample(prompt, params)
            counts["completions" if len(completion.tokens) == tokens else "errors"] += 1

    began = time.monotonic()
    await asyncio.gather(*(task(number) for number in range(connections)))
    return counts | {"seconds": time.monotonic() - began}


async def through(url: str, arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    numbers = (arguments.connections, arguments.tokens, seconds)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--url", url, "--connections", str(numbers[0]), "--tokens", str(numbers[1])),
        *("--seconds", str(numbers[2])),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return json.loads(out)


async def compare(arguments: argparse.Namespace, directory: str) -> dict:
    import torchtitan_rl.config as rl
    from torchtitan_rl import Controller
    from torchtitan_rl.rollout.chat import Chat
    from torchtitan_rl.serve.gateway import Served
    from torchtitan_rl.serve.run_gateway import Address, policy_of
    from torchtitan_rl.tasks.letter_sort import LetterSort

    shape = rl.Qwen3Shape(
        vocab_size=264, dim=512, n_layers=10, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, max_seq_len=512
    )
    config = rl.RunConfig(
        name="gateway_load",
        task=LetterSort.Config(),
        model=rl.ModelConfig(assets="bytes", shape=shape),
        sampling=rl.SamplingConfig(max_prompt_tokens=64, max_tokens=64),
        generator=rl.GeneratorConfig(dtype="bfloat16", max_num_seqs=128, kv_cache_gib=0.5),
        output_dir=f"{directory}/run",
    )
    blocks: dict[str, list] = {"direct": [], "gateway": []}
    async with await Controller.launch(config) as controller:
        client, me = controller.generator, psutil.Process()
        served = Served(name="policy", policy=policy_of(client, controller.tokenizer, 128), versions=list)
        prompt = Chat(controller.tokenizer).prompt(MESSAGES)
        async with Address(port=0).gateway(served, context_tokens=128, vocab_size=shape.vocab_size) as gateway:
            seconds = arguments.seconds / arguments.blocks
            for block in range(-1, arguments.blocks):  # the first pair warms up
                for kind in ("direct", "gateway") if block % 2 else ("gateway", "direct"):
                    before_s, length = cpu_s(me), seconds if block >= 0 else min(5.0, seconds)
                    if kind == "direct":
                        counts = await direct(client, prompt, arguments.connections, arguments.tokens, length)
                    else:
                        gateway.sessions.spans.reset()
                        counts = await through(gateway.url, arguments, length)
                        counts["server_ms"] = gateway.sessions.spans.as_dict()["cpu_mean_ms"]
                    counts["cpu_ms"] = 1000 * (cpu_s(me) - before_s) / max(1, counts["completions"])
                    counts["rss_mib"] = me.memory_info().rss / 2**20
                    if block >= 0:
                        blocks[kind].append(counts)
    return summary(blocks)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def summary(blocks: dict[str, list], kind: str = "gateway") -> dict:
    per_s = {kind: [b["completions"] / b["seconds"] for b in kind_blocks] for kind, kind_blocks in blocks.items()}
    memory = [block["rss_mib"] for block in blocks[kind]]
    return {
        "completions_per_s": {kind: round(median(values), 1) for kind, values in per_s.items()},
        "ratio": round(median(g / d for d, g in zip(per_s["direct"], per_s[kind])), 3),
        "ratios": [round(g / d, 3) for d, g in zip(per_s["direct"], per_s[kind])],
        "num_completions": sum(block["completions"] for block in blocks[kind]),
        "errors": sum(block["errors"] for kind_blocks in blocks.values() for block in kind_blocks),
        "cpu_ms": {kind: round(median(b["cpu_ms"] for b in kind_blocks), 2) for kind, kind_blocks in blocks.items()},
        "server_cpu_ms": round(median(block["server_ms"] for block in blocks[kind]), 3),
        "rss_mib": [round(memory[0], 1), round(memory[-1], 1)],
        "rss_growth": round(memory[-1] / memory[0] - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind, over all blocks")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="of each completion")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        counted = load(arguments.url, arguments.connections, arguments.tokens, arguments.seconds)
        print(json.dumps(asyncio.run(counted)))
        return
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(compare(arguments, directory))))


if __name__ == "__main__":
    main()
