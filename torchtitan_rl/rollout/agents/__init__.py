"""Agents as their makers ship them: a file for each says how it is started without a person.

`rollout.installed` makes workflows of them. `python -m torchtitan_rl.rollout.agents.claude_code` starts one by hand,
with the environment that `rollout.agent_process` gives a command. These modules import nothing heavy: each attempt
starts one.
"""
