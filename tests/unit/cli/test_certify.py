"""What the verb `certify` takes as layouts, and which models it refuses at once."""

import argparse
import asyncio
import json

import pytest

from torchtitan_rl.cli.certify import _certify, _layouts


def test_layouts_are_pairs_of_degrees():
    assert _layouts("2x1,1x2") == ((2, 1), (1, 2))


@pytest.mark.parametrize("text", ["", ",", "0x1", "-1x2", "2x1,1x0", "2", "2x1x1", "axb"])
def test_a_layout_without_ranks_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="write FSDPxTP, such as 2x1,1x2,2x2"):
        _layouts(text)


def test_one_rank_is_no_layout_to_compare():
    with pytest.raises(argparse.ArgumentTypeError, match="1x1 is the one rank that layouts are compared with"):
        _layouts("2x1,1x1")


GPT2 = json.dumps({"model_type": "gpt2", "n_head": 12, "n_embd": 768, "n_layer": 12})


@pytest.mark.parametrize(
    "text, said",
    [
        (GPT2, "'gpt2'"),
        ("{not json", "its config.json is not JSON"),
        ("[]", "its config.json holds no JSON object; fetch the directory again"),
    ],
)
def test_a_config_json_that_no_family_reads_is_refused_with_the_model(text, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    model = str(tmp_path)
    args = argparse.Namespace(model=model, layouts=((2, 1),), family="", json=False, output="", debug=False, quiet=True)
    assert asyncio.run(_certify(args)) == 1
    printed = "".join(capsys.readouterr())
    assert f"model={model!r}" in printed and said in printed and "KeyError" not in printed
