"""A judge behind an OpenAI-compatible endpoint, against a small server that fails one request in ten."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.kit.refusal import refusal
from torchtitan_rl.config.resolve import rebuilt, resolved
from torchtitan_rl.tasks import judge_http
from torchtitan_rl.tasks.judge_http import HttpJudge, Verdict, only_number
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import Task

TASK = Task(id="t/0", prompt="How many?", answer="7")
PROMPT = "{prompt} {answer} {completion}"


class Server(ThreadingHTTPServer):
    """Answers with the last word of the last message. Every `fail_every`-th request gets `status`; `hang` answers
    nothing."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.requests, self.failed, self.now, self.most = threading.Lock(), [], 0, 0, 0
        self.fail_every, self.status, self.hang, self.over = 0, 500, False, threading.Event()
        self.cut = self.page = False

    def handle_error(self, request, client_address):
        """A client that has left is no error here."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append((self.path, self.headers["Authorization"], body))
            failing = server.fail_every and len(server.requests) % server.fail_every == 0
            server.failed += bool(failing)
            server.now += 1
            server.most = max(server.most, server.now)
        server.over.wait(5.0) if server.hang else time.sleep(0.01)
        with server.lock:
            server.now -= 1
        asked = body["prompt"] if self.path.endswith("/v1/completions") else body["messages"][-1]["content"]
        answer = asked.split()[-1]
        said = {"error": {"message": "overloaded"}} if failing else chat_completion(answer)
        said.get("choices", [{}])[0].update(text=answer, finish_reason="length" if server.cut else "stop")
        data = b"<html>a page</html>" if server.page else json.dumps(said).encode()
        self.send_response(server.status if failing else 200)
        for name, value in {
            "Content-Type": "text/html" if server.page else "application/json",
            "Content-Length": len(data),
            "retry-after-ms": "20",
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def chat_completion(text):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}


@pytest.fixture
def server():
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.over.set()
        made.shutdown()
        thread.join()


def http_judge(server, **fields):
    return HttpJudge(base_url=server.url, model="judge", **{"prompt": PROMPT} | fields)


async def test_one_failure_in_ten_shows_in_the_log_alone(server, caplog):
    server.fail_every = 10
    reward = Rewards({"judge": (http_judge(server, concurrency=4, retries=3, timeout_s=10), 2.0)})
    completions = [[f"{i}.{j}" for j in range(4)] for i in range(15)]
    assert (await asyncio.gather(*(judge(reward, TASK, group, 0.001) for group in completions))) == [
        [2 * float(c) for c in group] for group in completions
    ]
    assert server.failed >= 6 and len(server.requests) == 60 + server.failed
    assert server.most <= 4
    warnings = [record.getMessage() for record in caplog.records if record.name == "torchtitan_rl.tasks.limited"]
    assert len(warnings) == len(str(server.failed))  # the 1st, 10th ... retry
    assert warnings[0] == f"retry 1 of a reward: {server.url}: a request was answered at try 2"
    path, key, body = min(server.requests, key=lambda request: request[2]["messages"][0]["content"])
    assert (path, key) == ("/v1/chat/completions", "Bearer none")
    assert body == {
        "model": "judge",
        "messages": [{"role": "user", "content": "How many? 7 0.0"}],
        "temperature": 0.0,
        "max_tokens": 512,
    }


async def refused(reward, *completions):
    with pytest.raises(RuntimeError) as caught:
        await judge(reward, TASK, list(completions), 30.0)
    return str(caught.value)


async def test_what_fails_to_the_last_names_judge_address_and_task(server):
    server.fail_every = 1
    said = await refused(http_judge(server, retries=1), "1")
    assert said.startswith("reward=torchtitan_rl.tasks.judge_http:HttpJudge") and "for task 't/0'" in said
    assert server.url in said and "overloaded" in said and len(server.requests) == 2


async def test_what_cannot_pass_is_not_tried_again(server):
    server.fail_every, server.status = 1, 401
    assert "AuthenticationError" in await refused(http_judge(server, retries=5), "1")
    assert len(server.requests) == 1


async def test_a_judge_that_does_not_answer_is_late(server):
    server.hang = True
    began = time.monotonic()
    assert "APITimeoutError" in await refused(http_judge(server, retries=1, timeout_s=0.2), "1")
    assert time.monotonic() - began < 5 and len(server.requests) == 2


async def test_a_server_that_sends_blanks_for_ever_is_named_with_the_limit(server, monkeypatch):
    monkeypatch.setattr(judge_http, "LONGEST_WAIT_S", -29.5)
    server.hang = True
    assert "gave no whole answer within 0.5 s, retries included; see what keeps" in await refused(
        http_judge(server, retries=0), "1"
    )


async def test_an_answer_that_is_no_number(server):
    assert "the judge answered 'good', which has 0 numbers; ask for a number" in await refused(
        http_judge(server), "good"
    )
    lenient = http_judge(server, parse=lambda text: float(text == "good"))
    assert await judge(lenient, TASK, ["good", "bad"], 5.0) == [1.0, 0.0]


async def test_a_model_without_a_chat_template_goes_on_with_a_text(server):
    judged = http_judge(server, chat=False, parse=Verdict({"right": 1.0, "wrong": 0.0}))
    assert await judge(judged, TASK, ["right", "Wrong."], 5.0) == [1.0, 0.0]
    path, _, body = server.requests[0]
    assert path == "/v1/completions" and body["prompt"].startswith("How many? 7 ") and "messages" not in body
    messages = http_judge(server, chat=False, prompt=lambda task, text: [{"role": "user", "content": text}])
    assert "http_judge.chat=False: goes on with a text" in await refused(messages, "right")


async def test_an_address_without_its_version_is_named(server):
    """Many servers answer any path with a page."""
    server.page = True
    asked = HttpJudge(base_url=server.url.removesuffix("/v1"), model="m", prompt=PROMPT)
    with pytest.raises(RuntimeError, match="gave no completion, but .*; give the address up to and with its version"):
        await judge(asked, TASK, ["7"], 5.0)


async def test_half_a_number_is_no_reward(server):
    server.cut = True
    said = await refused(http_judge(server), "0.9")
    assert "the judge's answer '0.9' was cut off by the token limit; raise max_tokens" in said
    assert await judge(http_judge(server, parse_truncated=True), TASK, ["0.9"], 5.0) == [0.9]


def test_a_verdict_is_one_of_its_words():
    verdict = Verdict({"Right": 1.0, "wrong": -0.5})
    assert [verdict(text) for text in ("right", " RIGHT.\n", "right .", "wrong")] == [1.0, 1.0, 1.0, -0.5]
    assert "the judge answered 'rightly', which is none of 'Right', 'wrong'" in refusal(verdict, "rightly")
    for scores in ({}, {"": 1.0}, {"yes": 1.0, "Yes.": 0.0}):
        assert refusal(Verdict, scores).startswith("verdict.scores=")


@pytest.mark.parametrize(
    "text, number",
    [("0.5", 0.5), ("Score: -1.", -1.0), ("**.25**", 0.25), ("1e-2", 0.01), ("Score-7", 7.0), ("\u22121", -1.0)],
)
def test_the_only_number(text, number):
    assert only_number(text) == number


def test_several_numbers_are_none():
    assert "'7/10', which has 2 numbers" in refusal(only_number, "7/10")


async def test_a_function_writes_the_messages_and_a_key_comes_from_the_environment(server, monkeypatch):
    def asked(task, completion):
        return [{"role": "system", "content": "Judge."}, {"role": "user", "content": completion}]

    reward = http_judge(server, prompt=asked, api_key_env="JUDGE_KEY", request={"max_tokens": 4})
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert "http_judge.api_key_env='JUDGE_KEY': is not set" in await refused(reward, "1")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert await judge(reward, TASK, ["3"], 5.0) == [3.0]
    _, key, body = server.requests[-1]
    assert (key, body["messages"], body["max_tokens"]) == ("Bearer secret", asked(TASK, "3"), 4)


async def test_the_messages_of_a_chat_task_become_text(server):
    task = Task(id="t/1", prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}])
    assert await judge(http_judge(server), task, ["4"], 5.0) == [4.0]
    assert server.requests[0][2]["messages"][0]["content"] == "system: Be brief.\nuser: 2+2? None 4"


def test_a_judge_is_read_back_from_plain_data():
    verdict = Verdict({"right": 1.0, "wrong": 0.0})
    reward = HttpJudge(base_url="http://localhost:1/v1", model="m", prompt=PROMPT, concurrency=3, parse=verdict)
    assert rebuilt(json.loads(json.dumps(resolved(reward)))) == reward


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"base_url": "localhost:8000"}, "http_judge.base_url='localhost:8000': is no address"),
        ({"prompt": 'Say {"score": 1}: {completion}'}, 'http_judge.prompt=\'Say {"score": 1}'),
        ({"prompt": "How good is {prompt}?"}, "http_judge.prompt='How good is {prompt}?': does not show the judge the"),
        ({"concurrency": 0}, "http_judge.concurrency=0"),
        ({"retries": -1}, "http_judge.retries=-1"),
        ({"timeout_s": 0.0}, "http_judge.timeout_s=0.0"),
    ],
)
def test_impossible_judges_are_refused(fields, message):
    given = {"base_url": "http://localhost/v1", "model": "m", "prompt": PROMPT} | fields
    assert refusal(lambda: HttpJudge(**given)).startswith(message)
