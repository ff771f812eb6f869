"""Agents as their makers ship them, each in a whole run; those that are not installed are skipped.

`scripts/installed_agents.sh` installs them and runs this file.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.integration.conftest import ROOT
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout.installed import AGENTS

pytestmark = [pytest.mark.whole, pytest.mark.slow]

CONTEXT = 131_072  # Claude Code's first prompt has 58,000 bytes, and a token here is a byte

CONFIG = f"""
import torchtitan_rl.config as rl
from torchtitan_rl.algorithm import presets
from torchtitan_rl.rollout.external import CommandLimits, SessionLimits
from torchtitan_rl.rollout.installed import installed
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = rl.Qwen3Shape(
    vocab_size=264, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=128, max_seq_len={CONTEXT}
)


def config():
    workflow = installed(
        NAME,
        tool_parser="hermes",
        timeout_s=300,
        session=SessionLimits(max_turns=2),
        command=CommandLimits(memory_gib=128, max_disk_mib=200, num_parallel=1),  # node maps 100 GiB and uses 0.3
    )
    config = rl.RunConfig(
        name="agent",
        task=LetterSort.Config(min_letters=3, max_letters=4),
        model=rl.ModelConfig(assets="bytes", shape=SHAPE),
        supervised=rl.SupervisedConfig(num_steps=0),
        algorithm=presets.grpo(tasks_per_step=1, group_size=2, workflow=workflow),
        controller=rl.ControllerConfig(num_steps=1, eval_every=0, eval_tasks=1, test_tasks=1, pass_at_k=1),
        # The policy is random and never ends an answer. Here every byte ends one: Codex takes an answer that was cut
        # off for an error.
        sampling=rl.SamplingConfig(
            max_prompt_tokens={CONTEXT - 2048}, max_tokens=48, stop_token_ids=list(range(256))
        ),
        trainer=rl.TrainerConfig(max_tokens_per_microbatch={CONTEXT}),
        generator=rl.GeneratorConfig(
            dtype="float32",
            max_model_len={CONTEXT},
            max_num_seqs=4,
            kv_cache_gib=0.5,
            max_num_batched_tokens={CONTEXT},
        ),
    )
    config.trainer.training.seq_len = {CONTEXT}
    return config
"""


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_trains_on_what_an_installed_agent_was_told(name, tmp_path):
    agent, _ = AGENTS[name]
    if shutil.which(agent.program) is None:
        pytest.skip(f"{agent.program} is not on PATH; {agent.install}")
    file, run = tmp_path / "agent_config.py", tmp_path / "run"
    file.write_text(f"NAME = {name!r}\n{CONFIG}")
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(file), "--output-dir", str(run), "--quiet"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    records = list(read_rollouts(RunDir(run)))
    assert len(records) == 2
    for record in records:
        tokens = [[*sequence["tokens"], sequence["target_tokens"][-1]] for sequence in record["sequences"]]
        assert record["turns"]
        for turn in record["turns"]:
            start, sampled = turn["num_prompt_tokens"], list(turn["tokens"])
            assert sampled and any(sequence[start : start + len(sampled)] == sampled for sequence in tokens)
