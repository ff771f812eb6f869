"""Bytes by link, worked out by hand; what a microbatch calls; how long a batch takes."""

from collections import Counter
from pathlib import Path

import pytest

from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.tools.rehearse.capacity import Times, batch_times
from torchtitan_rl.tools.rehearse.hardware import GPUS, REACHED
from torchtitan_rl.tools.rehearse.links import Links, links_of, sent_by_rank
from torchtitan_rl.tools.rehearse.shards import MeshShards, mesh_shards
from torchtitan_rl.tools.rehearse.sync import SYNC, sync_links
from torchtitan_rl.tools.rehearse.trace_file import Collective, trace_microbatch
from torchtitan_rl.tools.rehearse.work import RoleWork, batch_work

CONFIGS = Path(__file__).parents[4] / "configs"
SHAPE = Qwen3Shape(
    vocab_size=100, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, max_seq_len=512
)
LAYER = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96 + 2 * 64 + 2 * 16
TABLE = 100 * 64


def trainer(replicate=1, dp=1, tp=1, **changes):
    config = TrainerConfig(**changes)
    config.parallelism.data_parallel_replicate_degree = replicate
    config.parallelism.data_parallel_shard_degree = dp
    config.parallelism.tensor_parallel_degree = tp
    return config


# Links.


def test_a_ring_sends_what_the_others_lack_and_twice_that_to_reduce_for_all():
    assert sent_by_rank(Collective("all_gather", 1200, 1, 4)) == 900
    assert sent_by_rank(Collective("reduce_scatter", 1200, 1, 4)) == 900
    assert sent_by_rank(Collective("all_reduce", 1200, 1, 4)) == 1800


def test_a_ring_over_two_hosts_leaves_each_host_once():
    links = links_of(Counter({Collective("all_gather", 1200, 1, 4): 3}), trainer(dp=4), [0, 0, 1, 1])
    assert links.within == {"FSDP gathers": 2700}  # by ranks 0 and 2; ranks 1 and 3 send to the other host
    assert links.between == {"FSDP gathers": 2700} and links.between_all == {"FSDP gathers": 5400}


def test_every_tensor_parallel_rank_has_a_ring_of_its_own_over_the_hosts():
    calls = Counter(
        {
            Collective("reduce_scatter", 100, 2, 2): 1,  # FSDP: ranks 0, 2 and 1, 3
            Collective("all_reduce", 100, 1, 2): 1,  # TP: ranks 0, 1 and 2, 3
            Collective("all_reduce", 100, 4, 2): 1,  # replicas: ranks 0, 4 and so on
        }
    )
    config = trainer(replicate=2, dp=2, tp=2)
    apart = links_of(calls, config, [0, 0, 1, 1, 2, 2, 3, 3])
    assert apart.between == {"FSDP gradients": 100, "tensor parallel": 0, "replicas' gradients": 200}
    assert apart.within == {"FSDP gradients": 0, "tensor parallel": 100, "replicas' gradients": 0}
    two = links_of(calls, config, [0, 0, 0, 0, 1, 1, 1, 1])
    assert two.between == {"FSDP gradients": 0, "tensor parallel": 0, "replicas' gradients": 400}
    assert two.between_all["replicas' gradients"] == 800


def test_a_publication_goes_to_each_host_once_in_the_generators_dtype():
    # A matrix of 8 x 4 in two shards on two hosts, and a vector of 6 that both of two replicas hold.
    shards = MeshShards(classes=[], cuts=[((8, 4), (("fsdp", 0),)), ((8, 4), (("fsdp", 0),))])
    links, taken = sync_links(shards, trainer(dp=2), "bfloat16", [0, 1], [2, 2, 3])
    assert taken == {2: 128, 3: 128}
    assert links.between == {SYNC: 128} and links.between_all == {SYNC: 256}
    # A generator beside a trainer rank takes in the other shard alone.
    assert sync_links(shards, trainer(dp=2), "float32", [0, 1], [1])[1] == {1: 128}
    # Replicas take turns: each sends half.
    links, taken = sync_links(shards, trainer(replicate=2), "bfloat16", [0, 1], [2])
    assert taken == {2: 128} and links.between == {SYNC: 64}


# What a microbatch calls.


def test_fsdp_gathers_each_layer_twice_and_the_tied_tables_once():
    traced = trace_microbatch(trainer(dp=4), ModelConfig(shape=SHAPE), "policy", 50, device="cpu", trains=True)
    layer, tables = Collective("all_gather", 4 * LAYER, 1, 4), Collective("all_gather", 4 * (TABLE + 64), 1, 4)
    assert traced.forward == {layer: 2, tables: 1}
    assert traced.backward == {
        layer: 2,
        Collective("reduce_scatter", 4 * LAYER, 1, 4): 2,
        Collective("reduce_scatter", 4 * (TABLE + 64), 1, 4): 1,
    }


def test_replicas_reduce_what_a_rank_is_left_with():
    traced = trace_microbatch(
        trainer(replicate=2, dp=4), ModelConfig(shape=SHAPE), "policy", 50, device="cpu", trains=True
    )
    reduced = {call: times for call, times in traced.backward.items() if call.stride == 4}
    assert reduced == {Collective("all_reduce", LAYER, 4, 2): 2, Collective("all_reduce", TABLE + 64, 4, 2): 1}


def test_bytes_are_a_constant_and_a_multiple_of_the_tokens():
    sent = []
    for tokens in (48, 96, 192):
        traced = trace_microbatch(
            trainer(dp=2, tp=2), ModelConfig(shape=SHAPE), "policy", tokens, device="cpu", trains=True
        )
        links = links_of(traced.forward + traced.backward, trainer(dp=2, tp=2), [0] * 4)
        sent.append((links.within["FSDP gathers"], links.within["tensor parallel"]))
    assert sent[0][0] == sent[1][0] == sent[2][0]
    assert (sent[2][1] - sent[1][1]) == 2 * (sent[1][1] - sent[0][1]) > 0


def test_a_role_that_scores_sends_no_gradients_and_frozen_weights_have_none():
    model = ModelConfig(shape=SHAPE)
    scored = trace_microbatch(trainer(dp=2), model, "reference", 50, device="cpu", trains=False)
    assert not scored.backward and {call.kind for call in scored.forward} == {"all_gather"}
    adapters = trace_microbatch(trainer(dp=2, lora=LoRAConfig(rank=4)), model, "policy", 50, device="cpu", trains=True)
    reduced = sum(call.nbytes * times for call, times in adapters.backward.items() if call.kind == "reduce_scatter")
    assert 0 < reduced < 4 * 2 * LAYER / 2


# Shards.


def test_ranks_with_unequal_shards_are_classes_of_their_own():
    # 100 rows in 8 parts of 13 leave 9 for the last; 96 and 64 divide.
    found = mesh_shards(trainer(replicate=2, dp=8), ModelConfig(shape=SHAPE), "policy", "cpu")
    assert [kind.ranks for kind in found.classes] == [[rank for rank in range(16) if rank % 8 != 7], [7, 15]]
    full, last = found.classes
    assert full.parameters == last.parameters == full.gradients == 4 * (2 * LAYER // 8 + 13 * 64 + 8)
    assert full.optimizer - last.optimizer == 2 * 4 * 4 * 64


def test_ranks_without_a_part_of_a_tensor():
    # 16 numbers of the norms of heads on 32 ranks.
    found = mesh_shards(trainer(dp=32), ModelConfig(shape=SHAPE), "policy", "cpu")
    assert sum(len(kind.ranks) for kind in found.classes) == 32 and len(found.classes) > 2
    assert len({kind.parameters for kind in found.classes}) == 1  # padded; moments are not
    assert found.largest.optimizer > min(kind.optimizer for kind in found.classes)


# A batch.


def test_microbatches_of_a_batch_by_hand():
    config = load_config(str(CONFIGS / "quickstart.py"))
    config.algorithm.tasks_per_step, config.algorithm.group_size, config.algorithm.num_epochs = 6, 4, 2
    config.algorithm.tasks_per_minibatch = 4
    config.sampling.max_prompt_tokens, config.sampling.max_tokens = 11, 10
    config.trainer.max_tokens_per_microbatch = 100
    config.trainer.parallelism.data_parallel_shard_degree = 2
    work = batch_work(config)
    # Minibatches of 16 and 8 completions of 20 tokens: 8 and 4 a rank, 5 of them in 100 tokens; twice.
    assert work.roles == {"policy": RoleWork(trained=2 * (2 + 1), trained_tokens=2 * (160 + 80))}
    assert (work.num_completions, work.optimizer_steps) == (24, 4)
    assert batch_work(config, 5).roles["policy"].trained_tokens == 2 * (8 + 4) * 15
    config.trainer.max_tokens_per_microbatch, config.sampling.max_tokens = 0, 990  # completions of 1,000 tokens
    numbers = [batch_work(config, device=device).roles["policy"].trained for device in ("cpu", "cuda")]
    assert numbers == [2 * (2 + 1), 2 * (1 + 1)]  # 8 and 4 a rank: four of them in 4,096 tokens, eight in 8,192


def test_what_takes_longest_is_named():
    config = load_config(str(CONFIGS / "qwen3_4b_gsm8k.py"))
    config.roles.colocation, work = "none", batch_work(config)
    links = {"policy": Links(within={"FSDP gathers": 0}, between={"FSDP gathers": 0})}
    times = batch_times(config, work, links, 0.001, GPUS["h100"])
    # 4.02e9 parameters of 2 bytes, read once a token: 1,024 times 8 GB at 70% of 3,350 GB/s are the least.
    least = 1024 * 2 * 4.02e9 / (3350e9 * REACHED["memory"])
    assert times.limit == "policy: compute"
    # 512 sequences of 1,535 tokens; 6 operations a parameter, the embedding is looked up and the tied head multiplied.
    products = 512 * 1535 * 6 * 4.02e9
    attention = 512 * 1535 * 3 * 36 * 2 * 32 * 128 * 1536
    assert times.train["policy: compute"] == pytest.approx(
        (products + attention) / (989e12 * REACHED["compute"]), rel=0.001
    )
    assert times.generate["generators: memory bandwidth of decoding"] > least
    slow = Links(within={"FSDP gathers": 0}, between={"FSDP gathers": int(1e15)})
    times = batch_times(config, work, {"policy": slow}, 0.001, GPUS["h100"])
    assert times.limit == "policy: network of FSDP, between hosts"
    assert times.train["policy: network of FSDP, between hosts"] == pytest.approx(1e15 / (400e9 * REACHED["network"]))
    assert "policy: compute" in times.hidden
    assert batch_times(config, work, links, 1e6, GPUS["h100"]).limit == "weight sync"


def test_what_overlaps_is_not_added():
    times = Times(generate={"a": 5.0}, train={"b": 2.0, "c": 4.0}, sync=1.0)
    assert (times.total, times.limit) == (12.0, "a")
    times.overlaps = True
    assert (times.total, times.limit) == (7.0, "c")


def test_roles_on_devices_of_their_own_work_at_once_and_the_slowest_counts():
    config = load_config(str(CONFIGS / "ppo_critic.py"))
    work, nothing = batch_work(config), {"policy": Links(), "critic": Links()}
    times = batch_times(config, work, nothing, 0.0, GPUS["h100"])
    # The critic scores each batch, and then both train on as many tokens, which is three times the work.
    assert sum((*times.train.values(), *times.hidden.values())) == pytest.approx(7 / 4 * sum(times.train.values()))
    config.roles.colocation = "all"
    turns = batch_times(config, work, nothing, 0.0, GPUS["h100"])
    assert set(turns.train) == {"policy: compute", "critic: compute"} and not turns.hidden
    assert sum(turns.train.values()) == pytest.approx(7 / 4 * sum(times.train.values()))


def test_a_reference_on_devices_of_its_own_scores_before_the_policy_trains():
    config = load_config(str(CONFIGS / "ppo_critic.py"))
    work = batch_work(config)
    work.roles["critic"].trained = work.roles["critic"].trained_tokens = 0
    times = batch_times(config, work, {"policy": Links(), "critic": Links()}, 0.0, GPUS["h100"])
    assert times.train["policy: compute"] == pytest.approx(3 * times.train["critic: compute"]) and not times.hidden
