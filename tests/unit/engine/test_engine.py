"""The engine's commands and steps, over an engine of vLLM's interface that computes nothing."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from torchtitan_rl import adapters
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.record.schedule import Schedules
from torchtitan_rl.types import Request, SamplingParams

adapters.prepare_vllm(eager=True)

from torchtitan_rl.engine import engine as engine_module  # noqa: E402
from torchtitan_rl.engine.engine import Engine  # noqa: E402

SHAPE = Qwen3Shape(vocab_size=8, dim=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, hidden_dim=16, max_seq_len=16)
REQUEST = Request([1, 2], SamplingParams(max_tokens=4))


class Recorded:
    """Admits every request, finishes none, and notes how many there are at each step."""

    def __init__(self):
        self.num_admitted, self.at_steps = 0, []

    def add_request(self, request_id, prompt, params):
        self.num_admitted += 1
        return request_id

    def has_unfinished_requests(self):
        return self.num_admitted > 0

    def step(self):
        self.at_steps.append(self.num_admitted)
        return []

    def reset_prefix_cache(self):
        return True


@pytest.fixture
def engine(tmp_path):
    """An engine whose thread is not started: a test calls what the thread would."""
    write_model_dir(tmp_path, SHAPE, assets_dir(ModelConfig(assets="chars")), eos=1, pad=0)
    engine = Engine(GeneratorConfig(), ModelConfig(assets=str(tmp_path)), seed=0, rank=0)
    engine._engine = Recorded()
    return engine


def test_requests_of_all_calls_that_wait_are_admitted_before_the_next_step(engine):
    """One call per step kept the rollouts of an environment waiting behind each other."""
    for count in (1, 2, 3):
        engine.submit([REQUEST] * count)
    engine._iterate()
    assert engine._engine.at_steps == [6]
    engine._iterate()
    assert engine._engine.at_steps == [6, 6]


def test_a_caller_cannot_cancel_a_future_that_the_engines_thread_sets(engine):
    (request,), load, probe = engine.submit([REQUEST]), engine.load(1), engine.probe()
    assert not (request.cancel() or load.cancel() or probe.cancel())
    engine._answer_probes()
    assert probe.result(timeout=0) is None


def test_an_engine_whose_runner_draws_by_old_numbers_does_not_schedule_ahead(engine, monkeypatch):
    monkeypatch.setattr(engine_module.LLMEngine, "from_engine_args", lambda args: Recorded())
    monkeypatch.setattr(engine_module.vllm_internals, "model", lambda built: None)
    monkeypatch.setattr(engine_module.vllm_internals, "model_runner", lambda built: "v1")
    engine._schedules_ahead = True
    with pytest.raises(RuntimeError, match="the engine has vLLM's V1 model runner, which draws tokens by numbers"):
        engine._build()


@pytest.mark.parametrize("ends_badly", [False, True])
def test_an_engine_whose_thread_fails_frees_its_memory_and_ends_its_record(tmp_path, monkeypatch, ends_badly):
    freed = []

    def shut_down(engine):
        freed.append(engine)
        if ends_badly:
            raise RuntimeError("no device")

    write_model_dir(tmp_path, SHAPE, assets_dir(ModelConfig(assets="chars")), eos=1, pad=0)
    engine = Engine(
        GeneratorConfig(),
        ModelConfig(assets=str(tmp_path)),
        seed=0,
        rank=0,
        schedules=Schedules(directory=str(tmp_path / "run"), followed={}),
    )
    built = Recorded()
    built.step = lambda: 1 / 0
    monkeypatch.setattr(engine, "_build", lambda: built)
    monkeypatch.setattr(engine_module.vllm_internals, "shut_down", shut_down)
    [waiting] = engine.submit([REQUEST])
    engine._run()
    with pytest.raises(RuntimeError, match="the engine has stopped: ZeroDivisionError"):
        waiting.result(0)
    assert freed == [built] and engine._recording._file.closed


def test_an_engine_takes_no_request_until_all_that_sleeps_is_awake(engine):
    slept, [refused] = engine.sleep(), engine.submit([REQUEST])
    early, weights, [half] = engine.wake("kv_cache"), engine.wake("weights"), engine.submit([REQUEST])
    engine._iterate()
    assert slept.result(0) is None and weights.result(0) is None
    for future, reason in (
        (refused, r"asleep=\['kv_cache', 'weights'\]: the generator gave its device"),
        (early, "the weights are still asleep"),
        (half, r"asleep=\['kv_cache'\]"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            future.result(0)
    awake = engine.wake("kv_cache")
    engine.submit([REQUEST])
    engine._iterate()
    assert awake.result(0) is None and engine._engine.at_steps == [1]
    refused = engine.sleep()
    engine._iterate()
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        refused.result(0)


def test_adapters_that_the_engine_holds_wrongly_are_its_own_fault_and_no_refusal(engine):
    class Model:
        """Takes adapters into slot 0 alone, and holds other values than it took."""

        def load_adapters(self, slot, tensors):
            if slot:
                raise KeyError(slot)
            return True

        def check_holds_adapters(self, slot, tensors):
            raise RuntimeError(f"slot {slot}: the engine holds other values")

    engine.model, engine.base = Model(), "base"
    refused, broken = Future(), Future()
    engine._staged = {1: {}, 2: {}}
    engine._config.max_adapters = 2
    engine._load_staged_adapters(1, 1, [refused])
    assert isinstance(refused.result(0), ValueError)
    with pytest.raises(RuntimeError, match="slot 0: the engine holds other values"):
        engine._load_staged_adapters(2, 0, [broken])
    assert not broken.done(), "the end of the engine's thread answers it"


class Finishing(Recorded):
    """Notes what happens in which order; finishes the oldest request at every step."""

    def __init__(self):
        super().__init__()
        self.admitted, self.log = [], []

    def add_request(self, request_id, prompt, params):
        self.admitted.append(request_id)
        self.log.append(params.seed)
        return request_id

    def has_unfinished_requests(self):
        return bool(self.admitted)

    def step(self):
        self.log.append("step")
        sampled = SimpleNamespace(token_ids=[3], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason="stop")
        return [
            SimpleNamespace(
                request_id=self.admitted.pop(0),
                finished=True,
                outputs=[sampled],
                prompt_logprobs=None,
                prompt_token_ids=[1, 2],
            )
        ]


def seeded(seed):
    return Request([1, 2], SamplingParams(max_tokens=4, seed=seed))


def test_an_engine_takes_the_steps_of_a_recorded_one_however_early_its_requests_come(tmp_path):
    write_model_dir(tmp_path / "model", SHAPE, assets_dir(ModelConfig(assets="chars")), eos=1, pad=0)

    def engine(directory, followed=None):
        schedules = Schedules(directory=str(tmp_path / directory), followed=followed or {})
        engine = Engine(
            GeneratorConfig(), ModelConfig(assets=str(tmp_path / "model")), seed=0, rank=0, schedules=schedules
        )
        engine._engine = Finishing()
        return engine

    first = engine("run")
    first.submit([seeded(1), seeded(2), seeded(3)])
    first._iterate()
    first.submit([seeded(4)])
    first._iterate()
    first.submit([seeded(5)])
    for _ in range(3):
        first._iterate()
    assert first._engine.log == [1, 2, 3, "step", 4, "step", 5, "step", "step", "step"]

    second = engine("replay", {"generator-0": str(tmp_path / "run" / "generator-0-1.jsonl")})
    second.submit([seeded(5), seeded(4), seeded(9)])
    second.submit([seeded(3), seeded(2), seeded(1)])
    for _ in range(6):
        second._iterate()
    assert second._engine.log == [*first._engine.log, 9, "step"]


def test_a_head_that_files_have_beside_a_tied_embedding_is_not_read(engine):
    files = {"model.embed_tokens.weight": torch.ones(8, 16), "lm_head.weight": torch.zeros(8, 16)}
    state = engine.from_hf(files)
    assert state["tok_embeddings.weight"].equal(files["model.embed_tokens.weight"])
    assert state.get("lm_head.weight", state["tok_embeddings.weight"]).all()
