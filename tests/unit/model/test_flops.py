"""Operations of small models, counted by hand."""

from torchtitan_rl.config.model import ExpertsShape, Qwen3Shape
from torchtitan_rl.model.flops import forward_flops, multiplied_parameters, training_flops

SIZES = dict(vocab_size=10, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, hidden_dim=16)
SHAPE = Qwen3Shape(**SIZES)


def test_a_token_is_multiplied_with_a_tied_table_once_and_with_one_of_two_tables():
    assert multiplied_parameters(SHAPE) == SHAPE.num_parameters
    untied = Qwen3Shape(**SIZES, tie_embeddings=False)
    assert multiplied_parameters(untied) == untied.num_parameters - 10 * 8


def test_a_token_is_multiplied_with_its_own_experts_alone():
    mixture = Qwen3Shape(**SIZES, experts=ExpertsShape(num_experts=4, top_k=1))
    assert multiplied_parameters(mixture) == mixture.num_parameters - 2 * 3 * (3 * 8 * 16)


def test_attention_looks_back_to_half_of_the_sequence():
    # 2 layers, 8 numbers of query heads: scores and values, 4 x 8 operations for each of 6 / 2 tokens
    assert forward_flops(SHAPE, 6) - forward_flops(SHAPE, 0) == 2 * (4 * 8) * 3


def test_training_is_three_forwards_or_two_where_the_model_is_frozen():
    forward = 5 * forward_flops(SHAPE, 5) + 3 * forward_flops(SHAPE, 3)
    assert training_flops(SHAPE, [5, 3]) == 3 * forward
    assert training_flops(SHAPE, [5, 3], adapters=True) == 2 * forward
