"""What is touched of vLLM's insides is there in both of its model runners, and weights are replaced where they lie."""

import ast
import importlib.util
import inspect
import os
from pathlib import Path

import pytest
import torch

from torchtitan_rl import adapters, platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.spec import build_spec

adapters.prepare_vllm(eager=True)

from vllm import envs  # noqa: E402
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.engine import detokenizer, output_processor  # noqa: E402
from vllm.v1.engine.core_client import InprocClient  # noqa: E402

from torchtitan_rl.engine import vllm_internals  # noqa: E402
from torchtitan_rl.engine.arguments import engine_args  # noqa: E402
from torchtitan_rl.engine.vllm_model import TorchtitanForCausalLM  # noqa: E402

RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
SHAPE = Qwen3Shape(vocab_size=11, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24)


def source(module):
    """A module's text, without importing it: a GPU's runner may not be importable here."""
    return Path(importlib.util.find_spec(module).origin).read_text()


def methods(module, name):
    """Methods of a class, by name, with the names of their parameters."""
    (found,) = (n for n in ast.parse(source(module)).body if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.name: [a.arg for a in n.args.args] for n in found.body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("which", RUNNERS)
def test_both_runners_give_the_model_and_reload_it_by_the_same_names(which):
    found = methods(RUNNERS[which], "GPUModelRunner")
    assert found["get_model"] == ["self"]
    assert "weights_iterator" in found["reload_weights"]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("vllm.v1.executor.uniproc_executor", "self.driver_worker = WorkerWrapperBase("),
        ("vllm.distributed.parallel_state", "_groups[group.unique_name] = weakref.ref(group)"),
        ("vllm.distributed.parallel_state", "self.mq_broadcaster = MessageQueue.create_from_process_group("),
        ("vllm.distributed.device_communicators.shm_broadcast", "self.buffer = ShmRingBuffer("),
        ("vllm.distributed.device_communicators.shm_broadcast", "if self.is_creator:\n                self"),
        ("vllm.v1.worker.worker_base", "self.worker: WorkerBase"),
        ("vllm.v1.worker.gpu_worker", "self.model_runner: GPUModelRunner = self._make_model_runner()"),
        ("vllm.v1.worker.cpu_worker", "self.model_runner = CPUModelRunner("),
        ("vllm.v1.engine.llm_engine", "self.model_executor = self.engine_core.engine_core.model_executor"),
        ("vllm.v1.engine.llm_engine", "self.vllm_config = vllm_config"),
        ("vllm.v1.engine.output_processor", "self.request_states: dict[str, RequestState]"),
        ("vllm.distributed.parallel_state", "def broadcast_object(self, obj: Any | None = None, src: int = 0):"),
        ("vllm.distributed.device_communicators.cpu_communicator", "def make_group_name("),
    ],
)
def test_the_way_from_an_engine_to_its_insides(module, text):
    assert text in source(module)


def test_what_a_request_and_a_client_offer():
    assert "detokenizer" in inspect.signature(output_processor.RequestState.__init__).parameters
    for kind in (detokenizer.IncrementalDetokenizer, detokenizer.BaseIncrementalDetokenizer):
        assert hasattr(kind, "output_token_ids") or "output_token_ids" in inspect.getsource(kind)
    assert callable(InprocClient.shutdown) and isinstance(VllmConfig.use_v2_model_runner, property)


def test_the_head_sizes_of_attention_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(platform.head_dims()) == CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize("given, seen", [("v1", "0"), ("v2", "1")])
@pytest.mark.parametrize("before", [None, "1"])
def test_the_choice_of_a_runner_ends_with_the_building(monkeypatch, given, seen, before):
    name = "VLLM_USE_V2_MODEL_RUNNER"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    envs.enable_envs_cache()  # as an engine that was built before has left it
    try:
        with vllm_internals.chosen_model_runner(given):
            assert os.environ[name] == seen
            assert envs.VLLM_USE_V2_MODEL_RUNNER is (seen == "1")
        assert os.environ.get(name) == before
        with vllm_internals.chosen_model_runner("auto"):
            assert os.environ.get(name) == before
    finally:
        envs.disable_envs_cache()


MODEL = ModelConfig(
    assets="somewhere",
    shape=Qwen3Shape(vocab_size=11, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, hidden_dim=24),
)


@pytest.mark.parametrize(
    "seqs, length, wanted, tokens", [(64, 64, 16384, 4096), (512, 64, 16384, 16384), (2, 64, 8, 64)]
)
def test_an_iteration_has_at_most_the_tokens_of_all_sequences(seqs, length, wanted, tokens):
    """vLLM's warm-up shares as many tokens as an iteration may have among the sequences, and a sequence with more than
    `max_model_len` reads beyond its block table on a GPU."""
    config = GeneratorConfig(max_num_seqs=seqs, max_model_len=length, max_num_batched_tokens=wanted)
    args = engine_args(config, MODEL, seed=3)
    assert args.max_num_batched_tokens == tokens
    assert tokens / seqs <= length


def test_kernels_that_the_model_has_not_are_not_tuned():
    assert engine_args(GeneratorConfig(), MODEL, seed=3).enable_flashinfer_autotune is False
    vllms = GeneratorConfig(model_impl="vllm")
    assert engine_args(vllms, MODEL, seed=3).enable_flashinfer_autotune is None


def test_on_a_cpu_steps_are_not_scheduled_ahead():
    assert engine_args(GeneratorConfig(), MODEL, seed=3).async_scheduling is False


def test_graphs_are_of_decoding_only_and_nothing_is_compiled():
    """torchtitan's blocks are no class that vLLM compiles; its own models are left to its defaults."""
    compilation = engine_args(GeneratorConfig(enforce_eager=False), MODEL, seed=3).compilation_config
    assert compilation.mode == CompilationMode.NONE
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    for default, eager in ((GeneratorConfig(), True), (GeneratorConfig(model_impl="vllm", enforce_eager=False), False)):
        args = engine_args(default, MODEL, seed=3)
        assert args.enforce_eager is eager and args.compilation_config.mode is None


def test_a_compiled_engine_captures_graphs_where_enforce_eager_does_not_forbid_it():
    eager, graphs = (GeneratorConfig(compile=True, enforce_eager=eager) for eager in (True, False))
    for config in (eager, graphs):
        args = engine_args(config, MODEL, seed=3)
        assert args.enforce_eager is False and args.compilation_config.mode is None  # vLLM's default compiles
    assert engine_args(eager, MODEL, seed=3).compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert engine_args(graphs, MODEL, seed=3).compilation_config.cudagraph_mode is None


def test_a_load_leaves_every_parameter_where_it_lies():
    """A captured CUDA graph reads the addresses it was captured with."""
    model = TorchtitanForCausalLM.__new__(TorchtitanForCausalLM)
    torch.nn.Module.__init__(model)
    model.tp_rank, model.tp_size, model.decoder = 0, 1, build_spec(ModelConfig(shape=SHAPE)).model.build()
    model.decoder.init_weights()
    before = {name: p.data_ptr() for name, p in model.decoder.named_parameters()}
    weights = {name: torch.full_like(tensor, 0.5) for name, tensor in model.decoder.state_dict().items()}
    with torch.inference_mode():
        model.load_weights(weights.items())
    assert {name: p.data_ptr() for name, p in model.decoder.named_parameters()} == before
    assert all(bool((p == 0.5).all()) for p in model.decoder.parameters())
