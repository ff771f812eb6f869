"""A gateway with one session, whose policy says the same thing to everybody: python -m tests.security.gateway_door"""

import asyncio
import signal

from tests.unit.serve.fuzz import Chatter
from tests.unit.serve.opened import BYTES
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway


async def main() -> None:
    policy = Policy(generator=Chatter(), tokenizer=BYTES, max_tokens=64, max_prompt_tokens=64)
    async with Gateway(context_tokens=512) as gateway:
        limits = SessionLimits(max_turns=0, max_parallel=0)
        session = gateway.open_session(policy, seed=0, limits=limits, tool_parser="pythonic")
        print(f"gateway {gateway.url} {session.id} {session.secret}", flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        while not ended.is_set():
            await asyncio.sleep(0.5)
            session.answers.clear()  # a rollout keeps its turns; what is measured is the rest
            session._by_key.clear()
            session._kept_keys.clear()


if __name__ == "__main__":
    asyncio.run(main())
