"""The parts of a gap, and the causes that arithmetic can prove, on numbers worked out by hand or drawn."""

import numpy as np
import pytest

from torchtitan_rl.mismatch.causes import (
    Cause,
    Position,
    best,
    fitted,
    has_coarse_logits,
    mean_difference,
    shifted,
    tempered,
)
from torchtitan_rl.mismatch.gap import (
    LIMITS,
    RoundingLimits,
    Sample,
    decomposed,
    joined,
    of_turns,
    part_metrics,
    parts_over_limit,
)

NAN = float("nan")


def sample(reported, *, trainer=None, between=None, sampled=None, versions=None, turns=None) -> Sample:
    count = len(reported)
    return Sample(
        rollout="0/0/0",
        tokens=list(range(2 + count)),
        place_N=np.arange(2, 2 + count),
        turn_N=np.array(turns or [0] * count),
        reported_N=np.array(reported, float),
        version_N=np.array(versions or [3] * count),
        trainer_N=np.array(reported if trainer is None else trainer, float),
        between_N=np.array(reported if between is None else between, float),
        sampled_N=np.array(reported if sampled is None else sampled, float),
    )


def positions(num: int = 40, vocab: int = 30, seed: int = 0) -> tuple[Position, np.ndarray]:
    """Drawn distributions, with one token drawn from each, and the log-probabilities of all tokens, best first."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (num, vocab))
    top = -np.sort(-(logits - np.log(np.exp(logits).sum(1, keepdims=True))), axis=1)
    own = np.array([rng.choice(row, p=np.exp(row)) for row in top])
    return Position(own, top), top


def test_the_parts_add_up_to_the_gap_in_either_order_of_the_middle():
    one = sample([-1.0, -2.0], trainer=[-0.7, -2.6], between=[-0.8, -2.5], sampled=[-0.9, -2.2])
    for between, noise, stale in (("newest", [0.1, -0.1], [0.1, -0.3]), ("trainer", [0.1, -0.3], [0.1, -0.1])):
        parts = decomposed([one], between=between)
        assert parts.noise_N == pytest.approx(noise) and parts.stale_N == pytest.approx(stale)
        assert parts.rest_N == pytest.approx([0.1, -0.2]) and parts.gap_N == pytest.approx([0.3, -0.6])
        assert parts.noise_N + parts.stale_N + parts.rest_N == pytest.approx(parts.gap_N)


def test_metrics_are_of_the_tokens_that_were_scored_and_leave_out_what_is_unknown():
    one = sample([-1.0, -1.0, -1.0], sampled=[-1.0, -1.5, NAN], between=[-1.0, -1.5, -1.0])
    found = part_metrics(decomposed([one], between="newest"))
    assert found["mismatch/unexplained_mean"] == 0.25 and found["mismatch/unexplained_max"] == 0.5
    assert found["mismatch/explained_tokens"] == 2 and "mismatch/kept_mean" not in found
    nobody = part_metrics(decomposed([sample([-1.0], sampled=[NAN])], between="newest"))
    assert nobody == {"mismatch/noise_mean": 0.0, "mismatch/noise_max": 0.0, "mismatch/explained_tokens": 0}


def test_tokens_behind_an_update_of_their_own_turn_count_as_kept():
    one = sample([-1.0] * 5, versions=[3, 4, 4, 4, 5], turns=[0, 0, 0, 1, 1], sampled=[-1.0, -1.2, -1.0, -1.0, -1.4])
    assert one.kept_N.tolist() == [False, True, True, False, True]
    found = part_metrics(decomposed([one], between="newest"))
    assert found["mismatch/kept_max"] == pytest.approx(0.4) and found["mismatch/unexplained_max"] == 0
    parts = decomposed([one], between="newest")
    assert "rest" not in parts_over_limit(parts, LIMITS["float32"], keeps=True)
    assert "rest" in parts_over_limit(parts, LIMITS["float32"], keeps=False)


def test_limits_are_broken_by_the_mean_or_by_one_token_and_not_by_what_is_unknown():
    limits = RoundingLimits(mean=0.1, largest=1.0)
    assert not limits.broken_by(np.array([0.1, -0.1, NAN])) and not limits.broken_by(np.array([NAN]))
    assert limits.broken_by(np.array([0.2, -0.2])) and limits.broken_by(np.array([1.1] + [0.0] * 50))


def test_a_shift_moves_entries_within_turns_only():
    samples = [sample([-1.0, -2.0, -3.0, -4.0], turns=[0, 0, 1, 1]), sample([-5.0, -6.0])]
    scores, turns = joined(samples, "sampled_N"), of_turns(samples)
    assert [turn.tolist() for turn in turns] == [[0, 1], [2, 3], [4, 5]]
    np.testing.assert_equal(shifted(scores, turns, 1), [NAN, -1, NAN, -3, NAN, -5])
    np.testing.assert_equal(shifted(scores, turns, -1), [-2, NAN, -4, NAN, -6, NAN])


def test_temperature_one_changes_nothing_and_others_are_a_softmax():
    at, _ = positions()
    assert tempered(at, 1.0) == pytest.approx(at.own_N)
    two = Position(np.log(np.array([0.8])), np.log(np.array([[0.8, 0.2]])))
    assert np.exp(tempered(two, 0.5)) == pytest.approx(0.64 / 0.68)


@pytest.mark.parametrize(
    ("name", "reported", "said"),
    [
        ("temperature", lambda at, top: tempered(at, 0.83), "0.83"),
        ("top_k", lambda at, top: at.own_N - np.log(np.exp(top[:, :5]).sum(1)), "5 likeliest"),
        ("top_p", lambda at, top: at.own_N - np.log(_nucleus(top, 0.9)), "mass of 0.9"),
        ("min_p", lambda at, top: at.own_N - np.log(np.exp(np.where(top >= top[:, :1] - 3, top, -99)).sum(1)), "min_p"),
    ],
)
def test_a_setting_is_found_again_from_what_it_reports(name, reported, said):
    at, top = positions()
    seen = reported(at, top)
    causes = fitted(at, seen, "rest", 1.0)
    chosen = best(causes, mean_difference(at.own_N, seen), 1e-5)
    assert chosen is not None and chosen.name == name and said in chosen.words
    assert chosen.left_mean < 1e-5 or name == "min_p"  # whose grid is coarse


def _nucleus(top, mass):
    sums = np.exp(top).cumsum(1)
    return sums[np.arange(len(top)), (sums < mass).sum(1)]


def test_nothing_is_chosen_where_nothing_fits():
    at, _ = positions()
    seen = at.own_N + np.random.default_rng(1).normal(0, 0.3, len(at.own_N))
    assert best(fitted(at, seen, "rest", 1.0), mean_difference(at.own_N, seen), 1e-5) is None
    assert mean_difference(np.array([NAN]), np.array([1.0])) == np.inf
    half = Cause("rest", "shift", "", 0.5)
    assert best([half], 1.0, 1e-5) is None and best([half], 20.0, 1e-5) is half


def test_sixteen_bit_logits_are_told_from_finer_ones():
    torch = pytest.importorskip("torch")
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 3
    for dtype, coarse in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        top = logits.to(dtype).float().log_softmax(1).sort(descending=True).values.double().numpy()
        assert has_coarse_logits(Position(top[:, 0], top)) == coarse
