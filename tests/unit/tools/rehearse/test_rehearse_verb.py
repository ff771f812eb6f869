"""The command: what it prints, as tables and as JSON, and its exit status."""

import json
from pathlib import Path

import pytest

from torchtitan_rl.cli import main

CONFIG = str(Path(__file__).parents[4] / "configs" / "quickstart.py")
TWO = [
    *("--hosts", "3", "--gpus-per-host", "2", "--generator.num-replicas", "2"),
    *("--trainer.num-hosts", "2", "--trainer.parallelism.data-parallel-shard-degree", "4"),
]


def test_tables_name_places_memory_bytes_and_the_limit(capsys):
    assert main.main(["rehearse", CONFIG, *TWO]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of policy on GPU 0-1" in out and "2 generators of 1 rank on GPU 0-1" in out
    for said in ("parameters", "activations", "kv cache", "policy: FSDP gathers", "weight sync", "limited by "):
        assert said in out
    assert "1 built, one for all ranks with equal shards: 4 x" in out and out.endswith("nothing is refused\n")


def test_json_has_the_same_in_bytes_and_seconds(capsys):
    assert main.main(["rehearse", CONFIG, *TWO, "--json", "--between-gb-s", "1e-6"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["seats"] == [
        {"first": 0, "last": 1, "meshes": ["2 ranks of policy on GPU 0-1"]},
        {"first": 2, "last": 2, "meshes": ["2 generators of 1 rank on GPU 0-1"]},
    ]
    (kind,) = said["shards"]["policy"]
    assert kind["num_ranks"] == 4 and kind["gradients"] == kind["parameters"] == said["memory"]["policy"]["parameters"]
    # A shard of each of four ranks goes to one host in float32, whose two replicas share it.
    assert said["taken"] == {"2": 4 * said["memory"]["policy"]["parameters"]}
    assert said["links"]["weight sync"]["between_all"] == {"weight sync": said["taken"]["2"]}
    assert said["times"]["limit"] == "policy: network of FSDP, between hosts"  # of a kilobyte a second


def test_a_refusal_is_the_last_line_and_the_status(capsys):
    assert main.main(["rehearse", CONFIG, "--hosts", "2", "--gpus-per-host", "1", "--trainer.num-hosts", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("refused: trainer.num_hosts=3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "0"], "--hosts=0: must be at least 1"),
        (["--gpu-memory-gib", "nan"], "--gpu-memory-gib=nan: must be positive"),
        (["--hbm-gb-s", "-1"], "--hbm-gb-s=-1: must be positive"),
        (["--completion-tokens", "13"], "--completion-tokens=13: must be from 0"),
        (["--trainer.lr", "1"], "trainer.lr"),
    ],
)
def test_a_mistake_in_the_arguments_is_a_sentence(arguments, message, capsys):
    assert main.main(["rehearse", CONFIG, *arguments]) == 1
    assert message in capsys.readouterr().err
