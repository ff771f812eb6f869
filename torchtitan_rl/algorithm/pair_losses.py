"""Losses of preference pairs: functions of two numbers per pair, of the chosen completion and of the rejected one.

`(chosen_P, rejected_P, **loss_config) -> loss_P`, float64 tensors with one entry per pair (`preference.loss_fn`). For a
policy the numbers are log-ratios, log pi(y|x) - log pi_ref(y|x), summed over the completion's tokens or, with
`preference.length_normalized`, their mean. For a model with a value head they are its values at the last token. The
step minimises the mean over the pairs of its minibatch.

h in formulas is chosen - rejected, sigma the logistic function. The names in brackets are TRL's `loss_type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid, softplus

from torchtitan_rl.config.preference import PreferenceConfig

__all__ = [
    "alpha_divergence",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco",
    "bradley_terry",
    "discopop",
    "dpo",
    "exo",
    "forward_kl",
    "hinge",
    "ipo",
    "jensen_shannon",
    "loss_of",
    "nca",
    "robust_dpo",
    "scored",
    "sppo",
]


def dpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> torch.Tensor:
    """-log sigma(beta h): direct preference optimisation (Rafailov et al., arXiv:2305.18290) ["sigmoid"].

    `label_smoothing` = e gives conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences"):
    -(1 - e) log sigma(z) - e log sigma(-z), minimal where the policy prefers the chosen completion with 1 - e.
    z is beta h - `margin`, an offset (Amini et al., arXiv:2402.10571; SimPO's gamma, arXiv:2405.14734).
    """
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    if not math.isfinite(margin):
        raise ValueError(f"margin={margin}: is not finite; use 0 for none")
    z_P = beta * (chosen_P - rejected_P) - margin
    return (1 - label_smoothing) * softplus(-z_P) + label_smoothing * softplus(z_P)


def robust_dpo(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.1
) -> torch.Tensor:
    """(-(1 - e) log sigma(beta h) + e log sigma(-beta h)) / (1 - 2 e): its mean over labels that are flipped with
    probability e = `label_smoothing` is DPO's loss on right labels (Chowdhury et al., arXiv:2403.00409) ["robust"]."""
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    z_P = beta * (chosen_P - rejected_P)
    return ((1 - label_smoothing) * softplus(-z_P) - label_smoothing * softplus(z_P)) / (1 - 2 * label_smoothing)


def ipo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """(h - 1 / (2 beta))^2: identity preference optimisation (Azar et al., arXiv:2310.12036, equation 17) ["ipo"].

    The authors and TRL take log-ratios as means over tokens: `preference.length_normalized=True`.
    """
    _check_beta(beta)
    return (chosen_P - rejected_P - 0.5 / beta).square()


def hinge(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """max(0, 1 - beta h): SLiC-HF's hinge (Zhao et al., arXiv:2305.10425) on log-ratios (Liu et al., arXiv:2309.06657)
    ["hinge"]."""
    _check_beta(beta)
    return torch.relu(1 - beta * (chosen_P - rejected_P))


def exo(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 1e-3
) -> torch.Tensor:
    """KL of (sigma(beta h), sigma(-beta h)) from (1 - e, e) with e = `label_smoothing`, which must be above 0:
    efficient exact optimisation (Ji et al., arXiv:2402.00856, equation 16) ["exo_pair"]."""
    _check_beta(beta)
    _check_smoothing(label_smoothing)
    if label_smoothing == 0:
        raise ValueError("label_smoothing=0: the KL to certain labels is infinite; use 1e-3")
    z_P = beta * (chosen_P - rejected_P)
    right_P = torch.sigmoid(z_P) * (logsigmoid(z_P) - math.log1p(-label_smoothing))
    return right_P + torch.sigmoid(-z_P) * (logsigmoid(-z_P) - math.log(label_smoothing))


def nca(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """-log sigma(c) - 1/2 log sigma(-c) - 1/2 log sigma(-r) with c, r = beta x the log-ratios: noise contrastive
    alignment of pairs (Chen et al., arXiv:2402.05369) ["nca_pair"]."""
    _check_beta(beta)
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return softplus(-chosen_P) + 0.5 * softplus(chosen_P) + 0.5 * softplus(rejected_P)


def bco(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """-log sigma(beta x chosen) - log sigma(-beta x rejected): a binary classifier (Jung et al., arXiv:2404.04656),
    without the paper's moving shift of the rewards, as TRL has it ["bco_pair"]."""
    _check_beta(beta)
    return softplus(-beta * chosen_P) + softplus(beta * rejected_P)


def sppo(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2: self-play preference optimisation with certain wins (Wu
    et al., arXiv:2405.00675, equation 4.7) ["sppo_hard"]."""
    _check_beta(beta)
    return (chosen_P - 0.5 / beta).square() + (rejected_P + 0.5 / beta).square()


def apo_zero(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """1 - sigma(beta x chosen) + sigma(beta x rejected): for chosen completions that are better than the policy's
    (D'Oosterlinck et al., arXiv:2408.06266, equation 7) ["apo_zero"]."""
    _check_beta(beta)
    return torch.sigmoid(-beta * chosen_P) + torch.sigmoid(beta * rejected_P)


def apo_down(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """sigma(beta x chosen) + 1 - sigma(beta h): for chosen completions that are worse than the policy's; it makes both
    unlikelier, the rejected one more (D'Oosterlinck et al., arXiv:2408.06266, equation 8) ["apo_down"]."""
    _check_beta(beta)
    return torch.sigmoid(beta * chosen_P) + torch.sigmoid(-beta * (chosen_P - rejected_P))


def discopop(chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1, tau: float = 0.05) -> torch.Tensor:
    """(1 - m) x -log sigma(z) + m x exp(-z) with z = beta h, m = sigma(z / tau): the log-ratio modulated loss of Lu et
    al. (arXiv:2406.08414, equation 5) ["discopop"]."""
    _check_beta(beta)
    if not 0 < tau < math.inf:
        raise ValueError(f"tau={tau}: must be positive and finite, it is the width of the change of loss; use 0.05")
    z_P = beta * (chosen_P - rejected_P)
    mixed_P = torch.sigmoid(z_P / tau)
    # m exp(-z) as one exponential: where z is far below 0, m underflows while exp(-z) overflows.
    return (1 - mixed_P) * softplus(-z_P) + torch.exp(logsigmoid(z_P / tau) - z_P)


def aot_unpaired(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> torch.Tensor:
    """DPO's loss of the sorted chosen against the sorted rejected log-ratios of a minibatch: the distribution of one is
    to lie above that of the other (Melnyk et al., arXiv:2406.05882) ["aot_unpaired"]."""
    sorted_P = torch.sort(chosen_P, stable=True).values, torch.sort(rejected_P, stable=True).values
    return dpo(*sorted_P, beta=beta, label_smoothing=label_smoothing)


def bradley_terry(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, margin: float = 0.0, center: float = 0.0
) -> torch.Tensor:
    """-log sigma(chosen - rejected - margin) + center x (chosen + rejected)^2, of rewards: a reward model's loss
    (Ouyang et al., arXiv:2203.02155).

    `margin` is Llama 2's (arXiv:2307.09288), one for all pairs. A reward is known up to a constant; `center` holds it
    near 0 (Eisenstein et al., arXiv:2312.09244; TRL's `center_rewards_coefficient`).
    """
    if not math.isfinite(margin):
        raise ValueError(f"margin={margin}: is not finite; use 0 for none")
    if not 0 <= center < math.inf:
        raise ValueError(f"center={center}: must be finite and not negative; use 0 for none")
    return softplus(-(chosen_P - rejected_P - margin)) + center * (chosen_P + rejected_P).square()


def loss_of(config: PreferenceConfig) -> Callable:
    """The loss of a preference phase, without its arguments: the config's own, else `dpo` for the policy and
    `bradley_terry` for a model with a value head."""
    return config.loss_fn or (dpo if config.role == "policy" else bradley_terry)


# f-divergences in place of the reverse KL that a log-ratio stands for: f'(pi / pi_ref) for the log-ratio.


def scored(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, *, score: Callable, loss_fn: Callable = dpo, beta: float = 0.1
) -> torch.Tensor:
    """A loss of scores of the log-ratios: f-DPO with the derivative of another f-divergence as `score` (Wang et al.,
    arXiv:2309.16240). Example: `partial(scored, score=jensen_shannon)`."""
    return loss_fn(score(chosen_P), score(rejected_P), beta=beta)


def forward_kl(logratio_P: torch.Tensor) -> torch.Tensor:
    """f'(u) = 1 - 1 / u of the forward KL, log u = `logratio_P`."""
    return -torch.expm1(-logratio_P)


def jensen_shannon(logratio_P: torch.Tensor) -> torch.Tensor:
    """f'(u) = log(2 u / (u + 1)), log u = `logratio_P`."""
    return math.log(2) + logsigmoid(logratio_P)


def alpha_divergence(logratio_P: torch.Tensor, *, alpha: float = 0.5) -> torch.Tensor:
    """f'(u) = (u^(alpha - 1) - 1) / (alpha - 1), log u = `logratio_P`; `alpha` = 1 is the reverse KL, the log-ratio."""
    return logratio_P if alpha == 1 else torch.expm1((alpha - 1) * logratio_P) / (alpha - 1)


def _check_beta(beta: float) -> None:
    if not 0 < beta < math.inf:
        raise ValueError(f"beta={beta}: must be positive and finite, it is what a log-ratio is multiplied by; use 0.1")


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing}: is the probability of a flipped label, at least 0 and below 0.5; use "
            "0.1, or 0 for labels that are certain"
        )
