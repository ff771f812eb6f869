"""Why a token was pushed, from records; and the text of single tokens."""

import math
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.kit.runs import made_run
from torchtitan_rl.algorithm import presets
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.rollout.token_texts import pieces
from torchtitan_rl.tools.rollout_tokens import Clip, clip_of, explained
from torchtitan_rl.tools.rollouts import Rollouts
from torchtitan_rl.tools.run_tokenizer import tokenizer_of

ASSETS = Path(__file__).parents[3] / "torchtitan_rl" / "assets"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("runs") / "run")


def test_numbers_of_both_sides_stand_beside_each_token(run_dir):
    record = Rollouts(run_dir).complete("2/0/0")
    first, second = explained(record, Clip(low=0.2, high=0.2), lambda tokens: [f"t{n}" for n in tokens])
    a, b = first.tokens
    (c,) = second.tokens
    assert [t.text for t in (a, b, c)] == ["t3", "t4", "t6"] and [t.version for t in (a, b, c)] == [5, 5, 6]
    assert (a.generator, b.generator) == (-1.0, -1.0) and a.trainer == pytest.approx(-1.1, abs=1e-6)
    assert a.gap == pytest.approx(-0.1, abs=1e-6) and b.ratio == pytest.approx(math.exp(0.5)) and c.ratio == 1.0
    assert (a.advantage, b.clipped, c.clipped, a.trained) == (0.5, True, False, True)  # b: above 1.2, and praised
    assert a.weight == pytest.approx(1 / 3) and second.seconds == [0.3, 0.4, 0.5] and second.prompt == "j"
    worse = explained(Rollouts(run_dir).complete("2/0/1"), Clip(low=0.05, high=0.2), None)
    assert worse[0].tokens[0].clipped is True and worse[0].tokens[0].text is None  # below 0.95, and blamed


def test_without_the_places_of_turns_tokens_are_found_among_the_targets(run_dir):
    record = Rollouts(run_dir).complete("2/0/0")
    known = explained(record, None, None)
    record["sequences"][0]["turns"] = None
    assert explained(record, None, None) == known and known[1].tokens[0].trainer == -1.0


def test_a_rollout_that_did_not_train_has_the_generators_numbers(run_dir):
    turns = explained(Rollouts(run_dir).complete("3/0/0"), Clip(low=0.2, high=0.2), None)
    token = turns[0].tokens[0]
    assert (token.generator, token.trainer, token.ratio, token.gap, token.clipped) == (-1.0, None, None, None, None)
    assert explained({"turns": None}, None, None) == [] == explained({"turns": [None, 3]}, None, None)


def test_clip_bounds_come_from_the_config(run_dir):
    assert clip_of(Run(run_dir).config()) == Clip(low=0.2, high=0.2)
    assert clip_of({}) is None and clip_of({"algorithm": {"loss_config": {"clip_low": 0.2}}}) is None


@pytest.mark.parametrize("preset, clips", [("grpo", True), ("dapo", True), ("gspo", False), ("cispo", False)])
def test_only_the_loss_that_stops_the_gradient_of_a_token_by_its_own_ratio_clips_tokens(preset, clips):
    config = resolved(RunConfig(name="t", task=None, model=ModelConfig(), algorithm=getattr(presets, preset)()))
    assert (clip_of(config) is not None) is clips


def test_tokens_join_to_a_text_that_has_broken_characters():
    tokenizer = Tokenizer.from_file(str(ASSETS / "bytes" / "tokenizer.json"))
    dice = random.Random(0)
    for _ in range(300):
        tokens = tokenizer.encode("".join(dice.choice("aé🙂 \ufffd漢") for _ in range(12))).ids
        for _ in range(dice.randint(0, 3)):
            del tokens[dice.randrange(len(tokens))]
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=False), tokens


def test_tokens_of_half_characters_join_to_the_text(run_dir):
    tokenizer = Tokenizer.from_file(str(ASSETS / "bytes" / "tokenizer.json"))
    text = "häß 🙂 x" * 20
    tokens = tokenizer.encode(text).ids
    split = pieces(tokenizer, tokens)
    assert "".join(split) == text == tokenizer.decode(tokens) and len(split) == len(tokens) > len(text)
    assert pieces(tokenizer, []) == []
    assert tokenizer_of(Run(run_dir)).get_vocab_size() < 100  # the config says chars
