"""Agents by name: what their programs are started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_rl.rollout.agents.installed_agent import Attempt
from torchtitan_rl.rollout.installed import AGENTS, installed

PROMPT = "Fix --this;\n$(touch owned) 'now'"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A directory on PATH with a program for every agent, which writes down what it was started with."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for agent, _ in AGENTS.values():
        program = directory / agent.program
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            "json.dump({'arguments': sys.argv[1:], 'environment': dict(os.environ)}, open('started.json', 'w'))\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return directory


def started(tmp_path, name, *arguments, prompt=PROMPT) -> tuple[dict, Path]:
    """What an agent's program was started with, and its home."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (tmp_path / "task.json").write_text(json.dumps({"id": "t", "prompt": prompt}))
    environment = {
        "PATH": "/usr/bin:/bin",  # as in a sandbox
        "HOME": str(home),
        "TASK_FILE": str(tmp_path / "task.json"),
        "OPENAI_BASE_URL": "http://127.0.0.1:9/sessions/s/v1",
        "OPENAI_MODEL": "policy",
        "OPENAI_API_KEY": "of the session",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:9/sessions/s",
        "ANTHROPIC_API_KEY": "of the session",
    }
    workflow = installed(name, *arguments, env={"MORE": "1"})
    assert workflow.env.keys() == {"MORE", "AGENT_PROGRAM"}
    subprocess.run(workflow.agent, cwd=home, env=environment | workflow.env, check=True, timeout=60)
    return json.loads((home / "started.json").read_text()), home


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_started_with_the_prompt_as_it_is_the_policys_name_and_no_key_on_its_command_line(
    programs, tmp_path, name
):
    start, home = started(tmp_path, name, "--further", "words")
    words = start["arguments"]
    further = words.index("--further")
    assert words[-1] == PROMPT and words[further + 1] == "words"
    assert 0 < further and not [
        word for word in words[further + 2 : -1] if word not in ("-t", "--message", "--print", "--")
    ]
    files = "".join(file.read_text() for file in home.rglob("*") if file.is_file() and file.name != "started.json")
    assert "of the session" not in " ".join(start["arguments"]) + files
    assert "policy" in " ".join(start["arguments"]) + files
    assert start["environment"]["OPENAI_API_KEY"] == "of the session"
    assert not (home / "owned").exists()


def test_codex_and_opencode_read_where_the_policy_is_from_files_in_their_home(programs, tmp_path):
    start, home = started(tmp_path, "codex")
    config = (home / ".codex" / "config.toml").read_text()
    assert 'base_url = "http://127.0.0.1:9/sessions/s/v1"\n' in config and 'wire_api = "responses"' in config
    assert start["environment"]["CODEX_HOME"] == str(home / ".codex")
    _, home = started(tmp_path, "opencode")
    config = json.loads((home / ".config" / "opencode" / "opencode.json").read_text())
    assert config["provider"]["policy"]["options"]["baseURL"] == "http://127.0.0.1:9/sessions/s/v1"
    assert config["model"] == config["small_model"] == "policy/policy"


def test_chat_messages_become_one_text(tmp_path):
    (tmp_path / "task.json").write_text(
        json.dumps({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]})
    )
    names = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_MODEL")
    environment = {"TASK_FILE": str(tmp_path / "task.json"), "HOME": "/h"} | dict.fromkeys(names, "x")
    assert Attempt.of_environment(environment).prompt == "Be brief.\n\nGo."


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("é" * 70000, "prompt: has 140000 bytes, a command line takes 131072"),
        ("a\0b", "prompt: has a NUL character"),
        ([1, 2], "prompt: has tokens"),
    ],
)
def test_a_prompt_that_no_command_line_takes_is_refused(tmp_path, prompt, message):
    (tmp_path / "task.json").write_text(json.dumps({"prompt": prompt}))
    with pytest.raises(SystemExit, match=message):
        Attempt.of_environment({"TASK_FILE": str(tmp_path / "task.json")})


def test_an_agent_that_is_not_known_or_not_installed_is_refused_with_what_to_do(monkeypatch, programs):
    with pytest.raises(ValueError, match="agent='hal': is not known; use one of aider, claude-code, codex, mini-swe"):
        installed("hal")
    assert installed("claude-code").ignored == ("reasoning_effort",)
    assert installed("claude-code", ignored=()).ignored == ()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="agent='codex': its program 'codex' is not on PATH; install it with `npm"):
        installed("codex")


def test_what_starts_an_agent_imports_nothing_heavy():
    """An attempt starts one such process."""
    code = (
        "import sys, torchtitan_rl.rollout.agents.codex; print(sorted({'torch', 'vllm', 'monarch'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
