"""A controller's view of two hosts, without a run: attaches, and says when a host that was gone can be used again.

`python -m tests.network.attached WORKER WORKER` prints "attached"; then, for each line on its standard input, waits for
the second host to be back and prints the process id and host name of an actor that was started there then.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

from monarch.actor import Actor, endpoint

from torchtitan_rl.launch.attach import attach


class Where(Actor):
    @endpoint
    async def where(self) -> tuple[int, str]:
        return os.getpid(), socket.gethostname()


async def main(workers: list[str]) -> None:
    hosts = await attach(workers, timeout_s=120)
    print("attached", flush=True)
    number = 0
    while await asyncio.to_thread(sys.stdin.readline):
        began, number = time.monotonic(), number + 1
        await hosts.await_back(1, 60)
        there = time.monotonic() - began
        procs = hosts.mesh_of([1]).spawn_procs(per_host={"gpus": 1}, name=f"where{number}")
        pid, name = await asyncio.wait_for(_where(procs), 60)
        print(f"answer {name} {pid} {there:.1f} {time.monotonic() - began:.1f}", flush=True)
    os._exit(0)


async def _where(procs) -> tuple[int, str]:
    return await procs.spawn("where", Where).where.call_one()


if __name__ == "__main__":
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda failure: None
    asyncio.run(main(sys.argv[1:]))
