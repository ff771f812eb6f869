"""The engine's commands and steps, over an engine of vLLM's interface that computes nothing."""

import pytest

from torchtitan_rl import adapters
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.types import Request, SamplingParams

adapters.prepare_vllm(eager=True)

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
