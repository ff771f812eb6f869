"""Aider, by chat completions: it writes edits as text and calls no tools. It ends with the policy's first answer whose
edits apply."""

from __future__ import annotations

from torchtitan_rl.rollout.agents.installed_agent import Attempt, InstalledAgent, become


def _arguments(attempt: Attempt) -> list[str]:
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-pretty", "--no-stream"]
    alone = ["--yes-always", "--no-git", "--no-detect-urls", "--no-suggest-shell-commands", "--map-tokens", "0"]
    model = f"openai/{attempt.model}"
    return ["--model", model, "--weak-model", model, *quiet, *alone]


def _environment(attempt: Attempt) -> dict[str, str]:
    return {"OPENAI_API_BASE": attempt.base_url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


AGENT = InstalledAgent(
    name="aider",
    program="aider",
    install="install it with `pipx install aider-chat`",
    ignored=("temperature",),
    arguments=_arguments,
    task=lambda attempt: ["--message", attempt.prompt],
    environment=_environment,
)

if __name__ == "__main__":
    become(AGENT)
