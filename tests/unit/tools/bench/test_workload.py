"""The work of both sides: lengths, prompts, sizes."""

from statistics import mean

import pytest

from torchtitan_rl.tools.bench.workload import PROMPT_TOKENS, SHAPES, Workload


def workload(size="3m", family="qwen3", **more) -> Workload:
    return Workload(size=size, shape=SHAPES[family][size], dtype="float32", **more)


@pytest.mark.parametrize(
    "family, size, millions",
    [("qwen3", "0.6b", 596)]
    + [(family, size, n) for family in ("qwen3", "llama3", "qwen2") for size, n in (("3m", 3.15), ("32m", 31.4))],
)
def test_a_size_is_named_after_its_parameters_in_every_family(family, size, millions):
    assert SHAPES[family][size].num_parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert SHAPES[family][size].name == family


def test_vllm_has_a_model_of_its_own_of_every_shape():
    assert [shape.own_model_fault("cpu") for shapes in SHAPES.values() for shape in shapes.values()] == [""] * 7


def test_qwen3_goes_without_saying_in_a_name():
    assert workload().name == "3m" and workload("32m", "llama3").name == "llama3 32m"


def test_fixed_lengths_are_64_tokens():
    assert workload().completion_lengths("fixed") == [64] * 128


def test_skewed_lengths_are_short_but_for_a_few():
    lengths = workload().completion_lengths("skewed")
    assert mean(lengths) == pytest.approx(67, abs=1) and min(lengths) == 1 and max(lengths) == 256
    assert sorted(lengths)[64] == 48  # .9854^47 is .501, .9854^48 is .494: half of them end by then
    assert lengths != sorted(lengths) and lengths == workload().completion_lengths("skewed")


def test_eight_completions_share_a_prompt_that_no_other_repeat_has():
    first, second = workload().prompts(1), workload().prompts(2)
    assert len(first) == 128 and all(len(prompt) == PROMPT_TOKENS for prompt in first)
    assert first[0] == first[7] != first[8] and first == workload().prompts(1)
    assert not {tuple(prompt) for prompt in first} & {tuple(prompt) for prompt in second}
    assert max(max(prompt) for prompt in first) < workload().shape.vocab_size


def test_the_cache_of_a_generator_holds_all_completions_at_once():
    of_0_6b = workload("0.6b").generator()
    # 28 layers x keys and values x 8 heads x 128 numbers x 4 bytes
    per_token = 28 * 2 * 8 * 128 * 4
    blocks = sum(-(-(PROMPT_TOKENS + length) // 128) for length in workload().completion_lengths("skewed"))
    assert of_0_6b.kv_cache_gib * 2**30 == (blocks + 1) * 128 * per_token
    assert workload(num_prompts=1).generator().kv_cache_gib == 0.25
    assert of_0_6b.max_num_seqs == 128 and of_0_6b.max_model_len == 262
