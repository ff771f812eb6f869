"""Samples per second through the Tinker server, against the same samples by the sampling client, in one invocation.

    .venv/bin/python -m benchmarks.tinker_load [--seconds 60] [--connections 64] [--tokens 16] [--sdk | --swaps]

A Qwen3 of 32M random parameters, one generator. Blocks of both kinds alternate. A block of `direct`: so many tasks of
this process ask the client. A block of `http`: a process of its own opens as many connections, and on each asks for a
sample and then for its answer, in bare HTTP; with `--sdk` it has as many threads with the SDK. Prints one
line of JSON, as benchmarks/gateway_load.py does; `server_cpu_ms` is of the handlers, per sample.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil
import torch

from benchmarks.gateway_load import cpu_s, direct, summary

if TYPE_CHECKING:
    from torchtitan_rl.serve.tinker.service import Server

_SWAPS = 20
PROMPT = list(b"12+34=")
KEY = "tml-load"


def request(path: str, host: str, body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    head += "Accept: application/x-protobuf\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


async def answered(reader, writer, sent: bytes) -> tuple[bool, bytes]:
    """Whether the answer has status 200, and its body."""
    writer.write(sent)
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    return head.startswith(b"HTTP/1.1 200"), await reader.readexactly(int(length))


async def bare(url: str, base_model: str, connections: int, tokens: int, seconds: float) -> dict[str, float]:
    host, port = url.removeprefix("http://").split(":")
    end, counts = time.monotonic() + seconds, {"completions": 0, "errors": 0}
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": tokens, "stop": []},
        "base_model": base_model,
    }
    sent = request("asample", host, body)

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        while time.monotonic() < end:
            right, future = await answered(reader, writer, sent)
            if right:
                fetch = request("retrieve_future", host, {"request_id": json.loads(future)["request_id"]})
                right, answer = await answered(reader, writer, fetch)
                right = right and len(answer) > 8 * tokens and b'"error"' not in answer
            counts["completions" if right else "errors"] += 1
        writer.close()

    began = time.monotonic()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return counts | {"seconds": time.monotonic() - began}


def by_sdk(url: str, base_model: str, connections: int, tokens: int, seconds: float) -> dict[str, float]:
    import tinker
    from tinker import types

    client = tinker.ServiceClient(base_url=url, api_key=KEY).create_sampling_client(base_model=base_model).result()
    counts, params = {"completions": 0, "errors": 0}, types.SamplingParams(max_tokens=tokens, stop=[])
    lock, began = threading.Lock(), time.monotonic()

    def sampler() -> None:
        while time.monotonic() < began + seconds:
            try:
                answer = client.sample(types.ModelInput.from_ints(PROMPT), 1, params).result(60)
                right = len(answer.sequences[0].tokens) == tokens
            except Exception as error:
                print(error, file=sys.stderr)
                right = False
            with lock:
                counts["completions" if right else "errors"] += 1

    threads = [threading.Thread(target=sampler) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts | {"seconds": time.monotonic() - began}


async def through(url: str, base_model: str, arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.tinker_load", "--url", url, "--base-model", base_model),
        *("--connections", str(arguments.connections), "--tokens", str(arguments.tokens)),
        *("--seconds", str(seconds), *(["--sdk"] if arguments.sdk else [])),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return json.loads(out)


@asynccontextmanager
async def serving(directory: str) -> AsyncIterator[Server]:
    """A server on a Qwen3 of 32M random parameters."""
    import torchtitan_rl.config as rl
    from torchtitan_rl.cli.tinker_server import TinkerOptions, adapted, open_server
    from torchtitan_rl.config.derive import settled
    from torchtitan_rl.launch.choice import ActorBackend
    from torchtitan_rl.record.run_dir import RunDir
    from torchtitan_rl.tasks.letter_sort import LetterSort

    shape = rl.Qwen3Shape(
        vocab_size=264, dim=512, n_layers=10, n_heads=8, n_kv_heads=4, head_dim=64, hidden_dim=1536, max_seq_len=512
    )
    config = rl.RunConfig(
        name="tinker_load",
        task=LetterSort.Config(),
        model=rl.ModelConfig(assets="bytes", shape=shape),
        sampling=rl.SamplingConfig(max_prompt_tokens=64, max_tokens=64),
        generator=rl.GeneratorConfig(dtype="bfloat16", max_num_seqs=128, kv_cache_gib=0.5),
        output_dir=f"{directory}/run",
    )
    options = TinkerOptions(base_model="tiny")
    config, run_dir = settled(adapted(config, options)), RunDir.create(Path(directory) / "run")
    actors = ActorBackend()
    launcher = actors.launcher(config, actors.hosts_for(config, None, generators_only=False), str(run_dir.logs))
    try:
        server = await open_server(config, options, run_dir, launcher)
        yield server
        await server.close()
    finally:
        launcher.kill()


async def compare(arguments: argparse.Namespace, directory: str) -> dict:
    from torchtitan_rl.serve.listening import Listening
    from torchtitan_rl.serve.tinker.app import make_app
    from torchtitan_rl.serve.tinker.owners import OneKey

    blocks: dict[str, list] = {"direct": [], "http": []}
    async with serving(directory) as server:
        app, me = make_app(server, OneKey(KEY)), psutil.Process()
        async with Listening(app, "127.0.0.1", 0) as listening:
            seconds = arguments.seconds / arguments.blocks
            for block in range(-1, arguments.blocks):  # the first pair warms up
                for kind in ("direct", "http") if block % 2 else ("http", "direct"):
                    before_s, length = cpu_s(me), seconds if block >= 0 else min(5.0, seconds)
                    if kind == "direct":
                        client = server.generators.client
                        counts = await direct(client, PROMPT, arguments.connections, arguments.tokens, length)
                    else:
                        app.state.spans.reset()
                        counts = await through(listening.url, "tiny", arguments, length)
                        counts["server_ms"] = 1000 * app.state.spans.cpu_s / max(1, counts["completions"])
                    counts["cpu_ms"] = 1000 * (cpu_s(me) - before_s) / max(1, counts["completions"])
                    counts["rss_mib"] = me.memory_info().rss / 2**20
                    if block >= 0:
                        blocks[kind].append(counts)
    return summary(blocks, "http")


async def swaps(arguments: argparse.Namespace, directory: str) -> dict[str, float]:
    """What it costs to sample from another version: single requests, one after the other, of one version and of two in
    turn, medians in milliseconds; beside them one copy of a version's bytes in memory."""
    from torchtitan_rl.types import SamplingParams

    async with serving(directory) as server:
        versions, generator = server.policy_versions, server.generators.client
        file, first = Path(directory) / "version.safetensors", generator.policy_version
        await versions.save(first, file)
        await versions.publish_file(other := first + 1000, file, "swaps")
        seconds: dict[str, list[float]] = {"one_version_ms": [], "two_in_turn_ms": []}
        params = SamplingParams(max_tokens=arguments.tokens, seed=0)
        for number in range(4 * _SWAPS):
            name = "two_in_turn_ms" if number // _SWAPS % 2 else "one_version_ms"
            began = time.perf_counter()
            await generator.sample(
                PROMPT, params, policy_version=other if name == "two_in_turn_ms" and number % 2 else first
            )
            seconds[name].append(1000 * (time.perf_counter() - began))
        payload, copies = torch.ones(file.stat().st_size, dtype=torch.uint8), []
        target = torch.empty_like(payload)
        for _ in range(5):
            began = time.perf_counter()
            target.copy_(payload)
            copies.append(1000 * (time.perf_counter() - began))
        await versions.release(other, "swaps")
    medians = {name: round(median(of), 2) for name, of in seconds.items()}
    swap_ms, copy_ms = medians["two_in_turn_ms"] - medians["one_version_ms"], median(copies)
    return medians | {
        "swap_ms": round(swap_ms, 2),
        "version_mib": round(len(payload) / 2**20, 1),
        "copy_ms": round(copy_ms, 2),
        "copies_a_swap": round(swap_ms / copy_ms, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind, over all blocks")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="of each sample")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--sdk", action="store_true", help="ask by the SDK, not by bare HTTP")
    parser.add_argument("--swaps", action="store_true", help="the cost of sampling from another version, instead")
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    parser.add_argument("--base-model", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url:
        numbers = (arguments.connections, arguments.tokens, arguments.seconds)
        if arguments.sdk:
            print(json.dumps(by_sdk(arguments.url, arguments.base_model, *numbers)))
        else:
            print(json.dumps(asyncio.run(bare(arguments.url, arguments.base_model, *numbers))))
        return
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run((swaps if arguments.swaps else compare)(arguments, directory))))


if __name__ == "__main__":
    main()
