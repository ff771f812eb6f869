"""A family in a file of a user, OLMo 2: beside transformers, and what is refused."""

import json
from pathlib import Path

import pytest
from transformers import Olmo2Config

from tests.unit.families import olmo2
from tests.unit.families.olmo2 import Olmo2Shape
from tests.unit.families.shapes import SIZES
from tests.unit.families.test_families import check_logprobs_and_gradients, models_of
from torchtitan_rl.config import ModelConfig
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.tools.certify.certification import Certification
from torchtitan_rl.tools.certify.gradient_checks import check_layouts
from torchtitan_rl.tools.certify.small_config import small_config
from torchtitan_rl.tools.certify.subject import Subject
from torchtitan_rl.validation.trainer import check_degree

SHAPES = {"grouped": Olmo2Shape(**SIZES), "tied": Olmo2Shape(**SIZES | {"n_kv_heads": 4, "tie_embeddings": True})}


@pytest.mark.parametrize("kind", SHAPES)
def test_an_added_family_is_the_model_of_transformers(kind, tmp_path):
    shape = SHAPES[kind]
    ours, adapter, theirs = models_of(shape, tmp_path)
    check_logprobs_and_gradients(shape, ours, adapter, theirs)
    assert shape.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_a_directory_of_transformers_is_read(tmp_path):
    Olmo2Config(hidden_size=64, num_attention_heads=4, rope_theta=5e5).save_pretrained(tmp_path)
    shape = resolve_shape(ModelConfig(assets=str(tmp_path), family=Olmo2Shape))
    assert (shape.n_kv_heads, shape.head_dim, shape.rope_theta, shape.norm_eps) == (4, 16, 5e5, 1e-5)
    assert not shape.tie_embeddings
    hf = json.loads((tmp_path / "config.json").read_text())
    del hf["rms_norm_eps"]
    assert Olmo2Shape.from_hf_config(hf, "m") == shape
    assert Olmo2Shape.from_hf_config(shape.to_hf(1, 0), "m") == shape
    with pytest.raises(ValueError, match="m: its config.json says clip_qkv=8.0, which no OLMo 2"):
        Olmo2Shape.from_hf_config(hf | {"clip_qkv": 8.0}, "m")


def test_tensor_parallelism_is_refused_by_the_name_of_the_part():
    check_degree("generator.tensor_parallel_degree", 1, SHAPES["grouped"])
    with pytest.raises(ValueError, match=r"degree=2: must divide the model's ranks of a norm over all heads=1"):
        check_degree("generator.tensor_parallel_degree", 2, SHAPES["grouped"])


@pytest.mark.whole
async def test_the_trainer_breaks_no_line_of_certify(tmp_path):
    hf = small_config(SHAPES["grouped"].to_hf(1, 0))
    subject = Subject.of(Olmo2Shape.from_hf_config(hf, "m"), hf, tmp_path)
    checks = [check async for check in Certification(subject=subject, scratch=tmp_path).trainer()]
    assert len(checks) == 7 and not any(check.broken for check in checks)


async def test_certify_leaves_out_layouts_that_the_family_refuses(tmp_path):
    hf = small_config(SHAPES["grouped"].to_hf(1, 0))
    subject = Subject.of(Olmo2Shape.from_hf_config(hf, "m"), hf, tmp_path)
    checks = [check async for check in check_layouts(subject, [(1, 2), (2, 2)], str(tmp_path), {})]
    assert [check.difference for check in checks] == [None, None]
    assert {check.note for check in checks} == {"TP 2 does not divide ranks of a norm over all heads=1"}


def test_the_file_is_short():
    assert len(Path(olmo2.__file__).read_text().splitlines()) <= 150
