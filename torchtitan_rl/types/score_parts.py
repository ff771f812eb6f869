"""The parts of a reward that a reward model adds, by name (`Rollout.reward_parts`)."""

__all__ = ["SCORE", "TASK_REWARD"]

SCORE = "reward_model"
"""The classifier's score."""
TASK_REWARD = "task_reward"
"""The reward that the rollout had without the classifier."""
