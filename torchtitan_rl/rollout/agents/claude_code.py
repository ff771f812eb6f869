"""Claude Code, by Anthropic's Messages, streamed. It ends with the policy's first answer without a tool call."""

from __future__ import annotations

from torchtitan_rl.rollout.agents.installed_agent import Attempt, InstalledAgent, become


def _arguments(attempt: Attempt) -> list[str]:
    quiet = ["--output-format", "json", "--no-session-persistence", "--strict-mcp-config"]
    return ["--model", attempt.model, "--dangerously-skip-permissions", *quiet]


def _environment(attempt: Attempt) -> dict[str, str]:
    return {
        "ANTHROPIC_SMALL_FAST_MODEL": attempt.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": attempt.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CONFIG_DIR": str(attempt.home / ".claude"),
        "IS_SANDBOX": "1",  # without it, it refuses to skip permissions for root
    }


AGENT = InstalledAgent(
    name="claude-code",
    program="claude",
    install="install it with `npm install --global @anthropic-ai/claude-code`",
    ignored=("reasoning_effort",),
    arguments=_arguments,
    task=lambda attempt: ["--print", "--", attempt.prompt],
    environment=_environment,
)

if __name__ == "__main__":
    become(AGENT)
