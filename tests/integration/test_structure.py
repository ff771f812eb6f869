"""Completions whose text is constrained, by the real engine: what they hold, their noise, their log-probabilities."""

import json
import math

import pytest

from scripts.gpu_checks.engines import random_weights, started, untrained_dir
from tests.integration.conftest import ROOT
from tests.unit.serve.opened import BYTES
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.types import Request, SamplingParams

pytestmark = pytest.mark.whole

PROMPT = BYTES.encode("<|user|>12+7<|end|><|assistant|>")
SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}, "kind": {"enum": ["sum", "product"]}},
    "required": ["right", "kind"],
    "additionalProperties": False,
}


def tag(form):
    return json.dumps({"type": "structural_tag", "format": form})


YES_OR_NO = tag({"type": "or", "elements": [{"type": "const_string", "value": word} for word in ("yes", "no")]})
OBJECT = tag({"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 1})


def request(seed, structure="", **params):
    return Request(
        PROMPT, SamplingParams(max_tokens=params.pop("max_tokens", 64), seed=seed, structure=structure, **params)
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The completions of a random model, by what was asked of it."""
    model = load_config(str(ROOT / "configs" / "calculator_tools.py")).model
    directory, weights = untrained_dir(tmp_path_factory.mktemp("model"), model), random_weights(model, "float32")
    config = GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=64, kv_cache_gib=0.25)

    def completions(engine, requests):
        return [future.result(timeout=120) for future in engine.submit(requests)]

    with started(config, directory) as engine:
        engine.stage(0, weights)
        engine.load(0).result(timeout=120)
        free, mixed = [request(i, max_tokens=16) for i in range(8)], []
        for i in range(8):
            mixed += [free[i], request(100 + i, OBJECT)]
        wrong = engine.submit([request(1, tag({"type": "json_schema", "json_schema": {"type": "nonsense"}}))])[0]
        made = {
            "free": completions(engine, free),
            "mixed": completions(engine, mixed),
            "words": completions(engine, [request(i, YES_OR_NO) for i in range(200)]),
            "greedy": completions(engine, [request(i, YES_OR_NO, temperature=0.0) for i in range(2)]),
            "wrong": wrong.exception(timeout=60),
            "after": completions(engine, [free[0]]),
        }
    return made


def text(completion):
    return BYTES.decode(completion.tokens, skip_special_tokens=True)


def test_a_structure_is_kept_and_ends_the_completion(said):
    for completion in said["mixed"][1::2]:
        answer = json.loads(text(completion))
        assert set(answer) == {"right", "kind"} and answer["kind"] in ("sum", "product")
        assert completion.finish_reason == "stop"


def test_requests_without_a_structure_say_the_same_beside_those_with_one(said):
    assert [c.tokens for c in said["mixed"][::2]] == [c.tokens for c in said["free"]]
    assert said["after"][0].tokens == said["free"][0].tokens


def test_log_probabilities_are_among_the_tokens_that_could_be_drawn(said):
    words = {"yes": [], "no": []}
    for completion in said["words"]:
        words[text(completion)].append(completion.logprobs)
    first = {word: of_word[0][0] for word, of_word in words.items()}
    assert math.exp(first["yes"]) + math.exp(first["no"]) == pytest.approx(1.0, abs=1e-5)
    frequency, p = len(words["yes"]) / 200, math.exp(first["yes"])
    assert abs(frequency - p) < 4 * math.sqrt(p * (1 - p) / 200)
    assert all(
        logprobs[1:] == pytest.approx([0.0] * len(logprobs[1:]), abs=1e-6) for w in words for logprobs in words[w]
    )
    likelier = max(first, key=first.get)
    assert [text(completion) for completion in said["greedy"]] == [likelier] * 2


def test_a_structure_that_is_none_fails_its_request_alone(said):
    assert isinstance(said["wrong"], ValueError) and said["after"]
