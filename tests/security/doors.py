"""The servers that outsiders can reach, each in a process of its own, and requests that each takes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import torchtitan_rl
from tests.integration.tinker_server import tinker_server
from tests.kit.runs import made_run
from tests.kit.server_process import printed, server_process

BYTES = Path(torchtitan_rl.__file__).parent / "assets" / "bytes"
DOORS = ("gateway", "serve", "serve-tinker", "view")
MESSAGES = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "5"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
COMPLETIONS = [
    ("/v1/chat/completions", {"model": "policy", "messages": MESSAGES, "max_tokens": 4, "tools": [TOOL], "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES[:1], "max_tokens": 4, "stop": ["a"], "stream": True, "seed": 1}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 4, "logprobs": 0, "temperature": 0.5}),
    ("/v1/completions", {"prompt": "ab", "max_tokens": 4, "top_p": 0.9, "stop_token_ids": [5]}),
]


@dataclass(kw_only=True)
class Door:
    """One server: where it is, what it takes, what it writes."""

    name: str
    url: str
    process: psutil.Process
    log: Path
    requests: list[tuple[str, dict | None]]
    """Path and body of requests that are right; None: a GET without a body."""
    headers: dict[str, str] = field(default_factory=dict)
    """With the key, where the server asks for one."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def answers(self) -> bool:
        """Whether the first of its requests gets 200."""
        path, body = self.requests[0]
        method = "GET" if body is None else "POST"
        answer = httpx.request(method, self.url + path, json=body, headers=self.headers, timeout=60)
        return answer.status_code == 200

    def num_connections(self) -> int:
        """Connections that clients hold, at its own port."""
        connections = self.process.net_connections("tcp")
        return sum(c.laddr.port == self.address[1] and c.status != psutil.CONN_LISTEN for c in connections)

    def memory_mib(self) -> float:
        """Without the pages of files, such as libraries: the system drops them and reads them again as it likes."""
        memory = self.process.memory_info()
        return (memory.rss - memory.shared) / 2**20

    def tracebacks(self) -> list[str]:
        """Of the log, the lines that begin a traceback."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "Traceback (most recent" in line]


@contextmanager
def opened(name: str, directory: Path) -> Iterator[Door]:
    """A server by its name, until the block ends."""
    directory.mkdir(parents=True, exist_ok=True)
    if name == "serve-tinker":
        with tinker_server(directory) as (url, process):
            yield _tinker_door(url, psutil.Process(process.pid), directory / "server.log")
        return
    if name == "gateway":
        command, ready = ["-m", "tests.security.gateway_door"], r"gateway (\S+) (\S+) (\S+)"
    elif name == "serve":
        command, ready = (
            ["serve", str(_model(directory / "model")), "--port", "0", "--dtype", "float32"],
            r"serving (\S+)/v1",
        )
        command = ["-m", "torchtitan_rl.cli", *command, "--kv-cache-gib", "0.1", "--output-dir", str(directory / "run")]
    else:
        run = made_run(directory / "run").path
        command, ready = ["-m", "torchtitan_rl.cli", "view", str(run), "--port", "0"], r": (http://\S+);"
    with server_process(command, directory / "server.log") as process:
        found = printed(process, directory / "server.log", ready)
        requests, headers = list[tuple[str, dict | None]](COMPLETIONS), {}
        if name == "gateway":
            requests = [(f"/sessions/{found[2]}{path}", body) for path, body in COMPLETIONS]
            requests.append((f"/sessions/{found[2]}/reward", {"reward": 0.5, "parts": {"form": 1.0}}))
            headers = {"Authorization": f"Bearer {found[3]}"}
        if name == "view":
            requests = [(path, None) for path in _PAGES]
        yield Door(
            name=name,
            url=found[1],
            process=psutil.Process(process.pid),
            log=directory / "server.log",
            requests=requests,
            headers=headers,
        )


_PAGES = (
    *("/", "/curves?metric=reward/mean&smooth=5", "/evaluations", "/configs?show=all&q=lr", "/groups?step=1"),
    *("/rollouts?q=a&reward_min=0&step_max=3&sort=reward&page=1", "/group?id=2/0", "/rollout?id=2/0/1&tint=gap"),
    *("/text?id=2/0/1&part=text-0", "/api/curves?metric=reward/mean&metric=eval/accuracy&have=1", "/static/style.css"),
)


def _tinker_door(url: str, process: psutil.Process, log: Path) -> Door:
    """The server for Tinker's SDK, with a session and a model of it. It asks for no key."""
    with httpx.Client(base_url=f"{url}/api/v1", timeout=120) as http:
        base = http.get("/get_server_capabilities").json()["supported_models"][0]["model_name"]
        session_id = http.post("/create_session", json={"tags": [], "type": "create_session"}).json()["session_id"]
        asked = {"session_id": session_id, "model_seq_id": 0, "base_model": base, "lora_config": {"rank": 4}}
        request_id = http.post("/create_model", json=asked).json()["request_id"]
        model_id = _tinker_answer(http, request_id)["model_id"]
        saved = http.post("/save_weights", json={"model_id": model_id, "path": "kept"}).json()["request_id"]
        path = _tinker_answer(http, saved)["path"]
    tokens = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    tensors = {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
        "weights": {"data": [1.0, 1.0, 0.5], "dtype": "float32", "shape": [3]},
    }
    data = {"data": [{"model_input": tokens, "loss_fn_inputs": tensors}], "loss_fn": "cross_entropy"}
    sampled = {"prompt": tokens, "base_model": base, "num_samples": 2, "sampling_params": {"max_tokens": 4, "seed": 1}}
    requests: list[tuple[str, dict | None]] = [
        ("/api/v1/get_info", {"model_id": model_id}),
        ("/api/v1/forward_backward", {"model_id": model_id, "forward_backward_input": data}),
        ("/api/v1/forward", {"model_id": model_id, "forward_input": data}),
        ("/api/v1/optim_step", {"model_id": model_id, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}}),
        ("/api/v1/asample", sampled),
        ("/api/v1/session_heartbeat", {"session_id": session_id}),
        ("/api/v1/weights_info", {"tinker_path": path}),
        (
            "/api/v1/create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": base},
        ),
        ("/api/v1/retrieve_future", {"request_id": request_id}),
    ]
    return Door(name="serve-tinker", url=url, process=process, log=log, requests=requests)


def _tinker_answer(http: httpx.Client, request_id: str) -> dict:
    while (answer := http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    return answer.json()


def _model(directory: Path) -> Path:
    """A Hugging Face directory with a tiny Qwen3 of random weights."""
    tokenizer = AutoTokenizer.from_pretrained(BYTES)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def as_json(body: dict | None) -> bytes:
    return b"" if body is None else json.dumps(body).encode()
