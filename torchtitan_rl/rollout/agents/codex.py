"""Codex, by OpenAI's Responses, streamed. It ends with the policy's first answer without a tool call."""

from __future__ import annotations

import json

from torchtitan_rl.rollout.agents.installed_agent import Attempt, InstalledAgent, become


def _arguments(attempt: Attempt) -> list[str]:
    free = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--ephemeral"]
    return ["exec", *free]


def _files(attempt: Attempt) -> dict[str, str]:
    lines = [
        f"model = {json.dumps(attempt.model)}",
        'model_provider = "policy"',
        'web_search = "disabled"',  # its maker's servers would search
        "check_for_update_on_startup = false",
        "[features]",
        "multi_agent = false",  # a tool of a type that no chat template knows
        "[analytics]",
        "enabled = false",
        "[model_providers.policy]",
        'name = "policy"',
        f"base_url = {json.dumps(attempt.base_url)}",
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
        "request_max_retries = 0",
        "stream_max_retries = 0",
    ]
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _environment(attempt: Attempt) -> dict[str, str]:
    return {"CODEX_HOME": str(attempt.home / ".codex")}


AGENT = InstalledAgent(
    name="codex",
    program="codex",
    install="install it with `npm install --global @openai/codex`",
    arguments=_arguments,
    task=lambda attempt: ["--", attempt.prompt],
    environment=_environment,
    files=_files,
)

if __name__ == "__main__":
    become(AGENT)
