"""mini-swe-agent, by chat completions: one tool, `bash`. It ends once the policy runs the command that submits, or at
`agent.step_limit`."""

from __future__ import annotations

from torchtitan_rl.rollout.agents.installed_agent import Attempt, InstalledAgent, become


def _arguments(attempt: Attempt) -> list[str]:
    config = ["-c", "mini.yaml", "-c", "agent.cost_limit=0", "-c", "agent.step_limit=20"]
    output = ["-o", str(attempt.home / "trajectory.json")]
    return ["-y", "--exit-immediately", "-m", f"openai/{attempt.model}", *config, *output]


def _environment(attempt: Attempt) -> dict[str, str]:
    return {
        "MSWEA_CONFIGURED": "true",  # it would ask for a model and a key
        "MSWEA_COST_TRACKING": "ignore_errors",  # litellm knows no price of a policy
        "MSWEA_GLOBAL_CONFIG_DIR": str(attempt.home / ".mini"),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # it would ask for minutes beyond a session's limit
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch one
    }


AGENT = InstalledAgent(
    name="mini-swe-agent",
    program="mini",
    install="install it with `pipx install mini-swe-agent`",
    ignored=("temperature",),
    arguments=_arguments,
    task=lambda attempt: ["-t", attempt.prompt],
    environment=_environment,
)

if __name__ == "__main__":
    become(AGENT)
