"""What a run is estimated to need: by hand, against real tensors, and for the configs that name a card."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.meshes import GeneratorConfig, LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import RoleConfig, RunConfig
from torchtitan_rl.model.memory import (
    generator_parts,
    gpu_bytes,
    layer_activations,
    run_parts,
    trainer_parts,
    working_parts,
)
from torchtitan_rl.model.residency import device_bytes, gradient_tensors, model_tensors
from torchtitan_rl.model.spec import build_spec, training_spec
from torchtitan_rl.model.train_step import head_outputs
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.types import Microbatch

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
# 64 x 16 + 2 x 2736 + 16 parameters, see test_model_config.
TINY = Qwen3Shape(
    vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=512
)
QWEN3_0_6B = Qwen3Shape(
    vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072
)
CARDS = {"80 GB": 79 * GIB, "141 GB": 139 * GIB}
"""What torch says such cards have: 79.1 GiB an H100, 139.8 an H200."""


def trainer(*, tokens, checkpoint="none", compute="bfloat16", **changes):
    config = TrainerConfig(max_tokens_per_microbatch=tokens, activation_checkpoint=checkpoint, **changes)
    config.training.mixed_precision_param, config.training.seq_len = compute, 1
    return config


def test_what_a_layer_keeps_at_the_0_6b_shape():
    # D 1024, Q 2048, K 1024, F 3072.
    assert layer_activations(QWEN3_0_6B, "none") == 6 * 1024 + 5 * 2048 + 4 * 1024 + 4 * 3072 + 4 * 128 == 33_280
    assert layer_activations(QWEN3_0_6B, "selective") == 2 * 1024 + 2 * 2048 + 2 * 1024 + 3072 == 11_264
    assert layer_activations(QWEN3_0_6B, "full") == 1024
    # On 4 tensor-parallel ranks; 2 D, or D, of what a layer gathers or has not scattered are whole.
    assert layer_activations(QWEN3_0_6B, "none", 4) == (4 * 1024 + 5 * 2048 + 4 * 1024 + 4 * 3072) // 4 + 2048 + 512
    assert layer_activations(QWEN3_0_6B, "selective", 4) == (3 * 1024 + 2 * 2048 + 2 * 1024 + 3072) // 4 + 1024
    assert layer_activations(QWEN3_0_6B, "full", 4) == 256


def test_copies_of_a_shared_prompts_keys():
    """On a CPU every layer may hold three more keys and values a token, of 2 K numbers; on CUDA nothing is shared."""
    config, shared = (trainer(tokens=4096, shared_prefix=choice) for choice in ("off", "auto"))

    def activations(config, device):
        return working_parts(config, QWEN3_0_6B, device=device)["activations"]

    assert activations(shared, "cpu") - activations(config, "cpu") == 4096 * 2 * 28 * 3 * 2 * 1024
    assert activations(shared, "cuda") == activations(config, "cuda")


def test_a_trainer_of_0_6b_by_hand():
    plain = dict(tokens=16_384, checkpoint="selective", logprob_kernels="off")
    parts = trainer_parts(trainer(**plain, logprob_chunk_mib=128), QWEN3_0_6B)
    parameters = 596_049_920
    assert parts["parameters"] == parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 8 * parameters
    table, layer = 151_936 * 1024, (parameters - 151_936 * 1024) // 28  # 155.6M, 15.7M
    activations = 16_384 * 2 * (28 * 11_264 + 3 * 1024)
    # 16,384 tokens have 9.3 GiB of float32 logits: chunks of 128 MiB, three in float32 and one in bfloat16.
    at_the_head = activations + 128 * 2**20 * 7 // 2 + 6 * table + 2 * (table + layer)
    recomputed, gradients = 16_384 * 2 * (33_280 - 11_264), 16_384 * 2 * (2 * 3072 + 2 * 1024)
    # One rank fetches no layer ahead. Gathered: head and layer; passing: the gradients of the head and of a matrix.
    in_a_layer = activations + recomputed + gradients + 2 * (table + layer) + 2 * (table + 1024 * 3072)
    at_the_embedding = 10 * table  # in bfloat16, copied to float32 and reduced
    assert at_the_head > in_a_layer > at_the_embedding
    assert parts["working"] == at_the_head
    # With smaller chunks of logits the layer is the most.
    assert trainer_parts(trainer(**plain, logprob_chunk_mib=64), QWEN3_0_6B)["working"] == in_a_layer
    # Kernels hold logits in bfloat16 alone.
    config = trainer(tokens=16_384, checkpoint="selective", logprob_chunk_mib=2048)
    assert working_parts(config, QWEN3_0_6B)["logits"] == 2**30
    # With little text the embedding's and the head's gradient are the most.
    assert trainer_parts(trainer(tokens=64, checkpoint="full"), QWEN3_0_6B)["working"] == at_the_embedding
    # In float32 the gradients of embedding and head and their sum are more, beside the gathered parameters.
    float32 = trainer(tokens=64, checkpoint="full", compute="float32")
    assert trainer_parts(float32, QWEN3_0_6B)["working"] == 16 * table


def test_working_memory_of_a_head_of_its_own_on_eight_ranks_by_hand():
    shape = dataclasses.replace(QWEN3_0_6B, tie_embeddings=False)
    config = trainer(tokens=4096, checkpoint="full", logprob_chunk_mib=128, logprob_kernels="off")
    config.parallelism.data_parallel_shard_degree = 8
    table, layer = 151_936 * 1024, (596_049_920 - 151_936 * 1024) // 28
    activations, one = 4096 * 2 * (28 + 3) * 1024, 4096 * 2 * 33_280
    moments = {
        "head": 2 * (table + layer) + activations + 128 * 2**20 * 7 // 2 + 6 * table,
        "after the head": 2 * layer + activations + 6 * table + table // 2,  # a float32 copy, and an eighth of it
        "in a layer": 4 * layer
        + activations
        + one
        - 4096 * 2 * 1024
        + 4096 * 2 * (2 * 3072 + 2 * 1024)
        + 4 * table
        + 2 * 1024 * 3072,
    }
    assert max(moments, key=moments.get) == "head"
    assert sum(working_parts(config, shape).values()) == moments["head"]
    config.logprob_chunk_mib = 1
    config.max_tokens_per_microbatch = 8192
    assert working_parts(config, shape)["passing"] == 4 * table + 2 * 1024 * 3072


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 4096), ("cuda", 8192)])
def test_activations_are_those_of_the_devices_own_microbatch_where_the_config_says_none(device, tokens):
    parts = [trainer_parts(trainer(tokens=n, checkpoint="none"), QWEN3_0_6B, device=device) for n in (0, tokens, 6000)]
    assert parts[0] == parts[1] != parts[2]


def test_a_chunk_of_logits_by_device_where_the_config_leaves_it_open():
    sizes = {}
    for device in ("cpu", "cuda"):
        plain = dict(tokens=8192, checkpoint="full", compute="float32", logprob_kernels="off")
        config = trainer(**plain, logprob_chunk_mib=0)
        sizes[device] = trainer_parts(config, QWEN3_0_6B, trains=False, device=device)["working"]
        given = trainer(**plain, logprob_chunk_mib={"cpu": 128, "cuda": 2048}[device])
        assert trainer_parts(given, QWEN3_0_6B, trains=False, device=device)["working"] == sizes[device]
    gathered = 4 * (151_936 * 1024 + 2 * ((596_049_920 - 151_936 * 1024) // 28))
    assert sizes["cuda"] - gathered == 3 * 2048 * 2**20 and sizes["cpu"] - gathered == 8192 * 4 * 33_280


def test_shards_divide_what_stays_and_tensor_parallelism_what_is_gathered():
    one = trainer_parts(trainer(tokens=200), QWEN3_0_6B)  # too few for a second chunk of logits
    config = trainer(tokens=200)
    config.parallelism.data_parallel_shard_degree = 4
    four = trainer_parts(config, QWEN3_0_6B)
    assert [four[part] * 4 for part in ("parameters", "gradients", "optimizer")] == [
        one[part] for part in ("parameters", "gradients", "optimizer")
    ]
    # At the head: nothing of it is a shard.
    assert working_parts(config, QWEN3_0_6B) == working_parts(trainer(tokens=200), QWEN3_0_6B)
    config.parallelism.data_parallel_shard_degree, config.parallelism.tensor_parallel_degree = 1, 4
    whole, cut = working_parts(trainer(tokens=200), QWEN3_0_6B), working_parts(config, QWEN3_0_6B)
    assert [cut[part] * 4 for part in ("gathered", "logits", "passing")] == [
        whole[part] for part in ("gathered", "logits", "passing")
    ]
    # What each layer gathers, 2 D and the cosines, is whole on every rank, and D of the last norm.
    both = 200 * 2 * (28 * (2 * 1024 + 512) + 1024)
    assert (cut["activations"] - both) * 4 == whole["activations"] - both


def test_adapters_alone_have_gradients_and_moments():
    parts = trainer_parts(trainer(tokens=100, lora=LoRAConfig(rank=3)), TINY)
    adapters = 1488  # see test_config
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (
        4 * (6512 + adapters),
        4 * adapters,
        8 * adapters,
    )
    assert parts["working"] < trainer_parts(trainer(tokens=100), TINY)["working"]


def test_the_foreach_optimizer_takes_the_parameters_size_again():
    config = trainer(tokens=100)
    assert trainer_parts(config, TINY)["step"] == 0
    config.optimizer.implementation = "foreach"
    assert trainer_parts(config, TINY)["step"] == 4 * 6512


def test_a_generator_by_hand():
    config = GeneratorConfig(kv_cache_gib=24.0, max_num_seqs=256, max_num_batched_tokens=16_384, max_model_len=2048)
    parts = generator_parts(config, QWEN3_0_6B)
    assert parts["weights"] == 2 * 596_049_920 and parts["kv_cache"] == 24 * GIB
    assert parts["working"] == 2 * 16_384 * (4 * 1024 + 2 * 4096 + 3 * 3072) + 12 * 256 * 151_936
    config.tensor_parallel_degree = 2  # embedding and head and norms are whole on both ranks
    whole = 151_936 * 1024 + 28 * (2 * 1024 + 2 * 128) + 1024
    assert generator_parts(config, QWEN3_0_6B)["weights"] == 2 * whole + (596_049_920 - whole)


def test_an_iteration_has_no_more_tokens_than_its_sequences():
    config = GeneratorConfig(max_num_seqs=4, max_num_batched_tokens=16_384, max_model_len=100)
    assert generator_parts(config, QWEN3_0_6B)["working"] == 2 * 400 * (4 * 1024 + 2 * 4096 + 3 * 3072) + 48 * 151_936


def test_slots_for_adapters_by_hand():
    config = GeneratorConfig(max_model_len=64, max_adapters=3, adapters=LoRAConfig(rank=8, target_modules=["o_proj"]))
    assert generator_parts(config, QWEN3_0_6B)["adapters"] == 2 * 3 * 28 * 8 * (2048 + 1024)
    config.max_adapters = 0
    assert "adapters" not in generator_parts(config, QWEN3_0_6B)


def test_a_head_in_float32_by_hand():
    """Logits of a chunk in float32 and their gradient in bfloat16 on a GPU, a packed copy of the head on a CPU."""
    config = trainer(tokens=16_384, logprob_chunk_mib=2048)
    assert working_parts(config, QWEN3_0_6B)["logits"] == 2**30
    assert working_parts(config, QWEN3_0_6B, float32_head=True)["logits"] == 2**31 + 2**30
    generator = GeneratorConfig(dtype="bfloat16")
    packed = [
        generator_parts(generator, QWEN3_0_6B, "cpu", float32_head=value).get("packed", 0) for value in (False, True)
    ]
    of_head = 4 if packed[0] == 0 else 4 - 2  # a processor without packed products of bfloat16 has no copy otherwise
    assert packed[1] - packed[0] == of_head * 151_936 * 1024
    assert "packed" not in generator_parts(generator, QWEN3_0_6B, "cuda", float32_head=True)


# Against real tensors.


def tiny_model(shape, dtype=torch.float32, policy=None):
    view = SimpleNamespace(parallelism=ParallelismConfig(spmd_backend="partial_dtensor"))
    options = dict(attention="sdpa", chunk_bytes=64 * 4 * 16, chosen_products=policy is not SelectiveAC)
    model = training_spec(build_spec(ModelConfig(shape=shape)), view, **options).model.build()
    model.init_weights()
    if policy is not None:
        policy.Config().build().apply(model)
    return model.to(dtype)


def forward(model, lengths):
    tokens_T = torch.arange(sum(lengths)) % 64
    batch = Microbatch(tokens_T=tokens_T, target_tokens_T=tokens_T, lengths=lengths, loss_inputs={})
    return head_outputs(model, batch, torch.device("cpu"), temperature=1.0)["policy_logprobs"]


def test_parameters_gradients_and_moments_are_what_torch_holds():
    model = tiny_model(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forward(model, [5, 7]).sum().backward()
    gradients = device_bytes(gradient_tensors(model))
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parts = trainer_parts(trainer(tokens=12, compute="float32"), TINY)
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (
        device_bytes(model_tensors(model)),
        gradients,
        device_bytes(moments),
    )


class _Made(TorchDispatchMode):
    """Every storage that operators return, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
        return out

    def alive(self, besides):
        return sum(
            {
                pointer: size for pointer, size, ref in self.storages if not ref.expired() and pointer not in besides
            }.values()
        )


def kept_per_layer(policy, dtype):
    """Numbers per token that a layer more keeps from forward to backward."""
    kept, lengths = {}, [100, 90, 80, 130]
    for n_layers in (2, 4):
        shape = Qwen3Shape(
            vocab_size=64,
            dim=64,
            n_layers=n_layers,
            n_heads=8,
            n_kv_heads=4,
            head_dim=16,
            hidden_dim=192,
            max_seq_len=512,
        )
        model = tiny_model(shape, dtype, policy)
        with _Made() as made:
            logprobs = forward(model, lengths)
        kept[n_layers] = made.alive({parameter.data_ptr() for parameter in model.parameters()})
        del logprobs
    return shape, (kept[4] - kept[2]) / 2 / sum(lengths) / dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("checkpoint", "policy"), [("full", FullAC), ("selective", SelectiveAC)])
def test_what_checkpointing_keeps_is_what_is_alive_after_a_forward(checkpoint, policy, dtype):
    shape, measured = kept_per_layer(policy, dtype)
    estimate = layer_activations(shape, checkpoint)
    if checkpoint == "selective":  # a CPU's attention is not among the operators whose output is saved; a GPU's is
        estimate -= 8 * 16
    assert measured == pytest.approx(estimate)


def test_what_a_layer_keeps_without_checkpointing_is_within_five_percent():
    # In bfloat16 a CPU keeps float32 copies in norms and rotations, which a GPU's fused operators do not make.
    shape, measured = kept_per_layer(None, torch.float32)
    assert 0.95 <= layer_activations(shape, "none") / measured <= 1.05


# Who is on a GPU at the same time.


def run_config(colocation="none", **roles):
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig(shape=QWEN3_0_6B))
    config.roles.colocation = colocation
    for role in roles:
        setattr(config.roles, role, RoleConfig())
    return config


PARTS = {
    "policy": {"parameters": 10 * GIB, "gradients": 10 * GIB, "optimizer": 20 * GIB, "working": 15 * GIB, "step": 0},
    "reference": {"parameters": 10 * GIB, "gradients": 0, "optimizer": 0, "working": 4 * GIB, "step": 0},
    "generator": {"weights": 5 * GIB, "kv_cache": 30 * GIB, "working": 1 * GIB},
}


def needed(config, *roles):
    return gpu_bytes(config, roles, PARTS) / GIB


def test_apart_on_one_gpu_everything_is_there_at_once():
    # 55 and 36; a twentieth of all but the KV cache; two processes.
    assert needed(run_config(), "policy", "generator-0") == pytest.approx(91 + 0.05 * 61 + 2)
    assert needed(run_config(), "policy") == pytest.approx(55 * 1.05 + 1)
    assert needed(run_config(), "generator-0", "generator-1") == pytest.approx(72 + 0.05 * 12 + 2)


def test_graphs_stay_beside_each_generator():
    config = run_config()
    eager = needed(config, "policy", "generator-0")
    config.generator.enforce_eager = False
    assert needed(config, "policy", "generator-0") - eager == pytest.approx(1)


def test_taking_turns_the_largest_counts():
    config = run_config("all")
    # Without a warm start and with one step per batch the optimizer is away beside 10 + 10 + 15; then it steps.
    assert needed(config, "policy", "generator-0") == pytest.approx(40 * 1.05 + 2)
    config.supervised.num_steps = 1
    assert needed(config, "policy", "generator-0") == pytest.approx(55 * 1.05 + 2)
    config.supervised.num_steps, config.algorithm.num_epochs = 0, 2
    assert needed(config, "policy", "generator-0") == pytest.approx(55 * 1.05 + 2)
    PARTS_LARGE = {**PARTS, "generator": {**PARTS["generator"], "kv_cache": 60 * GIB}}
    assert gpu_bytes(config, ["policy", "generator-0"], PARTS_LARGE) / GIB == pytest.approx(66 + 0.05 * 6 + 2)


def test_a_reference_that_shares_adds_its_process_and_no_more():
    config = run_config("policy_reference", reference=True)
    assert needed(config, "policy", "reference") == pytest.approx(55 * 1.05 + 2)
    # On a host's only GPU the generator does not take turns with them.
    assert needed(config, "policy", "reference", "generator-0") == pytest.approx(91 + 0.05 * 61 + 3)


# Configs that name a card.


@pytest.mark.parametrize(
    ("config", "overrides", "card"),
    [
        ("qwen3_0_6b_gsm8k", [], "80 GB"),
        ("qwen3_0_6b_gsm8k", ["--generator.kv-cache-gib", "84"], "141 GB"),
        ("qwen3_4b_gsm8k", [], "80 GB"),
        ("qwen3_4b_gsm8k", ["--supervised.num-steps", "10", "--trainer.activation-checkpoint", "full"], "80 GB"),
        (
            "qwen3_4b_gsm8k",
            ["--generator.kv-cache-gib", "108", "--trainer.max-tokens-per-microbatch", "16384"],
            "141 GB",
        ),
    ],
)
def test_a_config_fits_the_card_it_names(config, overrides, card):
    loaded = load_config(str(CONFIGS / f"{config}.py"))
    apply_overrides(loaded, overrides)
    assert gpu_bytes(loaded, ["policy", "generator-0"]) < CARDS[card]


def test_a_4b_policy_beside_its_generator_does_not_fit_an_80_gb_card():
    config = load_config(str(CONFIGS / "qwen3_4b_gsm8k.py"))
    config.roles.colocation = "none"
    assert gpu_bytes(config, ["policy", "generator-0"], run_parts(config)) > CARDS["80 GB"]
