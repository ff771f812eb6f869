"""Small shapes of every built-in family, with and without what makes it special."""

from torchtitan_rl.families import (
    DeepseekV3Shape,
    ExpertsShape,
    GptOssShape,
    Llama3Shape,
    Qwen2Shape,
    Qwen3Shape,
    Qwen35Shape,
)
from torchtitan_rl.families.rope import Llama3Scaling, YarnScaling

SIZES = dict(vocab_size=61, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=96, max_seq_len=128)
YARN = YarnScaling(factor=4.0, original_max_seq_len=32)
UNROUNDED = YarnScaling(factor=4.0, original_max_seq_len=32, truncate=False)
WINDOW, LONG_WINDOW = 7, 64
LLAMA = Llama3Scaling(factor=8.0, original_max_seq_len=16)
DELTA = dict(n_key_heads=2, n_value_heads=4, key_head_dim=16, value_head_dim=32)

LATENT = SIZES | dict(n_kv_heads=4, n_layers=3, rotated_dim=8, value_dim=24, kv_lora_rank=20, dense_hidden_dim=80)
LATENT |= dict(experts=ExpertsShape(num_experts=8, top_k=3), route_scale=2.446, num_shared_experts=2)

SHAPES = {
    "qwen3": Qwen3Shape(**SIZES),
    "qwen3-untied": Qwen3Shape(**SIZES | {"head_dim": 16, "tie_embeddings": False}),
    "qwen3-yarn": Qwen3Shape(**SIZES, rope_scaling=YARN),
    "qwen3-moe": Qwen3Shape(**SIZES, experts=ExpertsShape(num_experts=4, top_k=2)),
    "llama3": Llama3Shape(**SIZES),
    "llama3-scaled": Llama3Shape(**SIZES | {"tie_embeddings": False}, rope_scaling=LLAMA),
    "qwen2": Qwen2Shape(**SIZES | {"tie_embeddings": False}),
    "qwen2-yarn": Qwen2Shape(**SIZES | {"head_dim": 16}, rope_scaling=YARN),
    "deepseek": DeepseekV3Shape(**LATENT | {"tie_embeddings": False}),
    "deepseek-q": DeepseekV3Shape(**LATENT, q_lora_rank=28, n_dense_layers=2),
    "gpt-oss": GptOssShape(
        **SIZES | {"n_layers": 3, "tie_embeddings": False},
        experts=ExpertsShape(num_experts=4, top_k=2),
        sliding_window=WINDOW,
        swiglu_limit=0.5,
        rope_scaling=UNROUNDED,
    ),
    "gpt-oss-plain": GptOssShape(
        **SIZES, experts=ExpertsShape(num_experts=3, top_k=3), sliding_window=LONG_WINDOW, swiglu_limit=7.0
    ),
    "qwen3_5": Qwen35Shape(**SIZES | {"n_layers": 4}, **DELTA),
    "qwen3_5-untied": Qwen35Shape(
        **SIZES | {"n_layers": 3, "tie_embeddings": False},
        **DELTA | {"n_value_heads": 2, "key_head_dim": 32},
        full_attention_interval=2,
        rotary_factor=0.5,
    ),
}
