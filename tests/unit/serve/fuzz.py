"""Throws requests at a gateway that hypothesis makes up: no answer is a 500, and every refusal has its dialect's form.

python -m tests.unit.serve.fuzz --seconds 300
"""

import argparse
import asyncio
import importlib
import json
import socket
import threading
import time

import httpx
from anthropic.types import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.unit.serve.opened import ADD, BYTES
from torchtitan_rl import adapters
from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.gateway import Gateway, Served
from torchtitan_rl.types import Completion

TEXTS = st.text(st.characters(), max_size=12) | st.sampled_from(
    ["", "hi", "what-the-policy-said", "<|end|>", "{{ 1 }}"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
CALL = st.fixed_dictionaries(
    {"id": TEXTS, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS}) | ANYTHING},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "king"])},
    optional={
        "content": TEXTS | st.lists(st.just({"type": "text", "text": "a"}) | ANYTHING, max_size=3) | st.none(),
        "tool_calls": st.lists(CALL, max_size=2),
        "tool_call_id": TEXTS,
        "name": ANYTHING,
        "reasoning_content": TEXTS,
    },
)
GOOD = {
    "model": st.sampled_from(["policy", "policy@1", "policy@99999999999999999999999", "gpt"]),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 50),
    "n": st.integers(1, 4),
    "seed": st.integers(),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "max_tokens": st.integers(-1, 600),
    "max_completion_tokens": st.integers(0, 600),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "tools": st.lists(st.just(ADD) | ANYTHING, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"])
    | st.just({"type": "function", "function": {"name": "add"}}),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}])
    | st.builds(lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, ANYTHING),
    "return_token_ids": st.booleans(),
    "return_policy_versions": st.booleans(),
    "logit_bias": ANYTHING,
    "anything": ANYTHING,
}
OPTIONS = {name: values | ANYTHING for name, values in GOOD.items()}
CHAT = st.fixed_dictionaries({}, optional={"messages": st.lists(MESSAGE, max_size=5) | ANYTHING} | OPTIONS)
IDS = st.lists(st.integers(-2, 300) | st.integers(), max_size=5)
TEXT = st.fixed_dictionaries(
    {}, optional={"prompt": TEXTS | IDS | st.lists(IDS | TEXTS, max_size=3) | ANYTHING} | OPTIONS
)
PART = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["input_text", "output_text", "text", "input_image", "thinking", "tool_use", "tool_result"]
        )
    },
    optional={"text": TEXTS, "id": TEXTS, "name": TEXTS, "input": ANYTHING, "tool_use_id": TEXTS, "content": ANYTHING}
    | {"thinking": TEXTS, "signature": TEXTS},
)
CONTENT = TEXTS | st.lists(PART | ANYTHING, max_size=3) | ANYTHING
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"]),
        "role": st.sampled_from(["user", "assistant", "system", "king"]),
        "status": st.sampled_from(["completed", "incomplete"]),
        "content": CONTENT,
        "output": CONTENT,
        "call_id": TEXTS,
        "name": TEXTS,
        "arguments": TEXTS,
        "summary": st.just([]) | ANYTHING,
        "encrypted_content": TEXTS,
    },
)
SAID = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENT})
SHARED = {
    name: OPTIONS[name] for name in ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "anything")
}
ADD_FLAT = {"type": "function", **ADD["function"]}
ADD_ANTHROPIC = {"name": "add", "input_schema": ADD["function"]["parameters"]}
RESPONSES = st.fixed_dictionaries(
    {"input": TEXTS | st.lists(ITEM, max_size=4) | ANYTHING},
    optional=SHARED
    | {
        "instructions": TEXTS | ANYTHING,
        "previous_response_id": TEXTS | ANYTHING,
        "max_output_tokens": st.integers(-1, 600),
        "tools": st.lists(st.just(ADD_FLAT) | st.just({"type": "web_search"}) | ANYTHING, max_size=2) | ANYTHING,
        "tool_choice": st.sampled_from(["auto", "required", {"type": "function", "name": "add"}]) | ANYTHING,
        "text": st.just({"format": {"type": "json_object"}}) | ANYTHING,
        "reasoning": st.just({"effort": "none"}) | ANYTHING,
        "include": st.just(["message.output_text.logprobs"]) | ANYTHING,
        "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2) | ANYTHING,
        "store": st.booleans() | ANYTHING,
        "background": st.booleans(),
    },
)
MESSAGES = st.fixed_dictionaries(
    {"messages": st.lists(SAID, min_size=1, max_size=4) | ANYTHING, "max_tokens": st.integers(0, 60)},
    optional=SHARED
    | {
        "system": CONTENT,
        "tools": st.lists(st.just(ADD_ANTHROPIC) | ANYTHING, max_size=2),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "add"}]) | ANYTHING,
        "thinking": st.just({"type": "adaptive"}) | ANYTHING,
        "stop_sequences": st.lists(TEXTS, max_size=3),
        "output_config": ANYTHING,
    },
)
# Most bodies should get past the first check: a good half has what is required.
SOUND = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=4)}, optional=GOOD)
BODY = st.one_of(CHAT, TEXT, SOUND, SOUND, ANYTHING).map(lambda body: json.dumps(body).encode()) | st.binary(
    max_size=40
)
SOUND_RESPONSES = st.fixed_dictionaries(
    {
        "input": TEXTS
        | st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=3)
    },
    optional={"model": st.just("policy"), "instructions": TEXTS, "stream": st.booleans(), "store": st.booleans()}
    | {"max_output_tokens": st.integers(1, 60), "tools": st.just([ADD_FLAT]), "metadata": st.just({"a": "b"})}
    | {"include": st.just(["message.output_text.logprobs"]), "reasoning": st.just({"effort": "none"})},
)
SOUND_MESSAGES = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "a"}]), "max_tokens": st.integers(1, 60)},
    optional={"model": st.just("policy"), "system": TEXTS, "stream": st.booleans(), "tools": st.just([ADD_ANTHROPIC])},
)
NOWHERE = st.sampled_from(["/models", "/models/policy", "/responses/resp_x", "/nowhere", "/chat//completions"])
OF_MESSAGES = st.sampled_from(["/messages", "/messages/count_tokens"])
ASKED = st.one_of(
    st.tuples(BODY, st.sampled_from(["/chat/completions", "/completions"]) | NOWHERE),
    st.tuples((SOUND_RESPONSES | RESPONSES).map(lambda body: json.dumps(body).encode()) | BODY, st.just("/responses")),
    st.tuples((SOUND_MESSAGES | MESSAGES).map(lambda body: json.dumps(body).encode()) | BODY, OF_MESSAGES),
)
"""A body and where it goes."""
METHODS = st.sampled_from(["POST", "POST", "POST", "POST", "GET", "PUT", "DELETE", "OPTIONS"])


class Chatter:
    """Says the same thing to everybody."""

    async def sample(self, tokens, params, *, policy_version=None):
        said = BYTES.encode("[add(a=1)] é.")[: params.max_tokens]
        return Completion(
            tokens=said, logprobs=[-0.5] * len(said), policy_versions=[1] * len(said), finish_reason="stop"
        )


class Target:
    """A gateway on a thread of its own, with an open session."""

    def __init__(self):
        self.ready, self.done = threading.Event(), None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self):
        policy = Policy(generator=Chatter(), tokenizer=BYTES, max_tokens=64, max_prompt_tokens=64)
        served = Served(name="policy", policy=policy, versions=lambda: [1], tool_parser="pythonic")
        self.loop, self.done = asyncio.get_running_loop(), asyncio.Event()
        async with Gateway(context_tokens=512, served=served) as self.gateway:
            limits = SessionLimits(max_turns=0, max_parallel=0)
            self.session = self.gateway.open_session(policy, seed=0, limits=limits, tool_parser="pythonic")
            self.ready.set()
            await self.done.wait()

    def __enter__(self):
        adapters.prepare_vllm(eager=True)  # takes longer than a client waits
        importlib.import_module("torchtitan_rl.serve.anthropic.message_events")
        importlib.import_module("torchtitan_rl.serve.responses.response_events")
        self.thread.start()
        assert self.ready.wait(30)
        return self

    def __exit__(self, *exc_info):
        self.loop.call_soon_threadsafe(self.done.set)
        self.thread.join(10)
        assert not self.thread.is_alive()


def check(answer, path):
    assert answer.status_code < 500, (answer.status_code, answer.text)
    posted = answer.request.method == "POST"
    if answer.status_code >= 400 and "/v1/messages" in path:
        assert answer.json().keys() == {"type", "error"} and answer.json()["error"].keys() == {"type", "message"}
        assert answer.json()["error"]["message"]
    elif answer.status_code >= 400:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):  # Starlette adds the charset
        ends = {"/v1/responses": '"response.', "/v1/messages": 'data: {"type": "message_stop"}\n\n'}
        assert ends.get(path, "data: [DONE]\n\n") in answer.text[-60000:]
    elif posted and path in CLASSES:
        CLASSES[path].model_validate(answer.json())


CLASSES = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/responses": Response,
    "/v1/messages": Message,
}
"""What a whole answer at a path is."""


def fuzz(seconds, max_examples=10**9, same=False):
    """Requests until time is up, `same`: the same ones each time. Returns how many of each status."""
    statuses, end = {}, time.monotonic() + seconds
    with Target() as target, httpx.Client(timeout=20) as http:
        url, session = target.gateway.url, target.session

        @settings(
            max_examples=min(max_examples, 500), derandomize=same, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(ASKED, METHODS, st.sampled_from(["", "session", "header", "wrong", "reward"]))
        def one(asked, method, who):
            body, path = asked
            if time.monotonic() > end:
                return
            headers = {"Content-Type": "application/json"}
            headers |= {"Authorization": f"Bearer {session.secret if who != 'wrong' else 'x'}"}
            headers |= {"X-Session-ID": session.id} if who == "header" else {}
            path = "/reward" if who == "reward" else f"/v1{path}"
            inside = who in ("session", "wrong", "reward")
            answer = http.request(
                method, f"{url}{f'/sessions/{session.id}' if inside else ''}{path}", content=body, headers=headers
            )
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            check(answer, path)
            if len(session.answers) > 200:
                target.loop.call_soon_threadsafe(session.answers.clear)

        while time.monotonic() < end and sum(statuses.values()) < max_examples:
            one()
        for raw in (
            b"\0\xff\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET / HTTP/9\r\n\r\n",
        ):
            with socket.create_connection((target.gateway.host, target.gateway.port), timeout=5) as connection:
                connection.sendall(raw)
                assert b" 500 " not in connection.recv(1000)
        assert http.get(f"{url}/healthz").json()["status"] == "ok"
    return statuses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    print(fuzz(parser.parse_args().seconds))
