"""OpenCode, by chat completions, streamed. It ends with the policy's first answer without a tool call."""

from __future__ import annotations

import json

from torchtitan_rl.rollout.agents.installed_agent import Attempt, InstalledAgent, become


def _arguments(attempt: Attempt) -> list[str]:
    return ["run", "--auto", "--pure", "--model", f"policy/{attempt.model}"]


def _files(attempt: Attempt) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",  # comes with it
        "options": {"baseURL": attempt.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {attempt.model: {"name": attempt.model}},
    }
    config = {
        "provider": {"policy": provider},
        "model": f"policy/{attempt.model}",
        "small_model": f"policy/{attempt.model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    return {".config/opencode/opencode.json": json.dumps(config, indent=2)}


def _environment(attempt: Attempt) -> dict[str, str]:
    return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


AGENT = InstalledAgent(
    name="opencode",
    program="opencode",
    install="install it with `npm install --global opencode-ai`",
    arguments=_arguments,
    task=lambda attempt: ["--", attempt.prompt],
    environment=_environment,
    files=_files,
)

if __name__ == "__main__":
    become(AGENT)
