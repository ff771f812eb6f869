"""The papers' formulas in plain Python and NumPy, double precision, one token or one rollout at a time.

Written from the formulas, not from the package: nothing of it is imported here. A batch is a list of sequences, each a
dict of equally long lists; `mask` is true where the policy produced the token, `weight` is the token's share of a mean.
"""

import itertools
import math

import numpy as np


def mean(values):
    return math.fsum(values) / len(values)


def std(values, ddof=0):
    return math.sqrt(math.fsum((value - mean(values)) ** 2 for value in values) / (len(values) - ddof))


# Advantages of one group: lists of rewards in, lists out.


def group_centered(rewards):
    """Dr. GRPO: A_i = r_i - mean(r)."""
    return [reward - mean(rewards) for reward in rewards]


def no_spread(rewards):
    """Equal but for rounding."""
    return max(rewards) - min(rewards) <= 1e-6 * max(abs(reward) for reward in rewards)


def grpo(rewards, kind="population"):
    """GRPO: A_i = (r_i - mean(r)) / std(r); 0 where all rewards are equal."""
    if no_spread(rewards):
        return [0.0] * len(rewards)
    if kind == "none":
        return group_centered(rewards)
    return [a / std(rewards, ddof=1 if kind == "unbiased" else 0) for a in group_centered(rewards)]


def rloo(rewards):
    """RLOO: A_i = r_i - 1 / (G - 1) sum over j != i of r_j; 0 for a group of one."""
    if len(rewards) == 1:
        return [0.0]
    return [reward - mean([other for j, other in enumerate(rewards) if j != i]) for i, reward in enumerate(rewards)]


def reinforce(rewards):
    return list(rewards)


def reinforce_pp_baseline(groups):
    """REINFORCE++ with baseline: A' = r - mean of the group; A = (A' - mean of all A') / std of all A'."""
    if all(no_spread(rewards) for rewards in groups):
        return [[0.0] * len(rewards) for rewards in groups]
    centered = [[0.0] * len(rewards) if no_spread(rewards) else group_centered(rewards) for rewards in groups]
    everything = [a for group in centered for a in group]
    return [[(a - mean(everything)) / std(everything) for a in group] for group in centered]


def opo(rewards, lengths):
    """OPO: A_i = r_i - sum of l_j r_j / sum of l_j."""
    baseline = math.fsum(length * reward for length, reward in zip(lengths, rewards)) / math.fsum(lengths)
    return [reward - baseline for reward in rewards]


def gdpo(groups, weights):
    """GDPO: the sum over parts of weight x GRPO of the part, less its mean over the batch, over its deviation.
    A group is a dict from parts to the numbers of its rollouts."""
    sums = []
    for group in groups:
        normalised = {name: grpo(group[name]) for name in weights}
        size = len(next(iter(normalised.values())))
        sums.append([math.fsum(weights[name] * normalised[name][i] for name in weights) for i in range(size)])
    everything = [number for of_group in sums for number in of_group]
    if max(map(abs, everything)) <= 1e-6 * math.fsum(map(abs, weights.values())):
        return [[0.0] * len(of_group) for of_group in sums]
    return [[(number - mean(everything)) / std(everything) for number in of_group] for of_group in sums]


def length_rewarded(rewards, lengths, weight, correct=1.0):
    """Kimi k1.5: r_i + weight x (1/2 - (l_i - min l) / (max l - min l)), at most r_i for a wrong rollout."""
    if min(lengths) == max(lengths):
        return list(rewards)
    short = [0.5 - (length - min(lengths)) / (max(lengths) - min(lengths)) for length in lengths]
    return [
        reward + weight * (bonus if reward >= correct else min(0.0, bonus)) for reward, bonus in zip(rewards, short)
    ]


def length_discounted(rewards, lengths, alpha, correct=1.0):
    """Arora and Zanette: r_i (1 - alpha sigmoid((l_i - mean) / std)) for a right rollout, over the right ones."""
    of_right = [length for reward, length in zip(rewards, lengths) if reward >= correct]
    discounted = []
    for reward, length in zip(rewards, lengths):
        if reward >= correct:
            relative = (length - mean(of_right)) / std(of_right) if len(set(of_right)) > 1 else 0.0
            reward *= 1 - alpha / (1 + math.exp(-relative))
        discounted.append(reward)
    return discounted


def pass_at_k(rewards, k, correct=1.0):
    """Pass@k training: the mean reward of the subsets of k rollouts with rollout i, less that of all subsets, over the
    standard deviation of all subsets; every subset is looked at. 0 where there is none, or where all are alike."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    rewarded = [float(any(rewards[i] >= correct for i in subset)) for subset in subsets]
    if not subsets or len(set(rewarded)) == 1:
        return [0.0] * len(rewards)
    return [
        (mean([r for subset, r in zip(subsets, rewarded) if i in subset]) - mean(rewarded)) / std(rewarded)
        for i in range(len(rewards))
    ]


# Losses of a batch of sequences: `weight`, `mask`, `policy`, `old`, `advantage` per token.


def token_loss(sequences, term):
    """-sum over trained tokens of weight x term(ratio, advantage, policy logprob)."""
    return -math.fsum(
        sequence["weight"][t]
        * term(math.exp(sequence["policy"][t] - sequence["old"][t]), sequence["advantage"][t], sequence["policy"][t])
        for sequence in sequences
        for t in range(len(sequence["mask"]))
        if sequence["mask"][t]
    )


def cross_entropy(sequences):
    return token_loss(sequences, lambda ratio, advantage, logprob: logprob)


def importance_sampling(sequences):
    return token_loss(sequences, lambda ratio, advantage, logprob: ratio * advantage)


def surrogate(ratio, advantage, low, high, dual=math.inf):
    """PPO's min of the plain and the clipped objective; for A < 0 at least dual x A."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, clipped * advantage)
    return max(objective, dual * advantage) if advantage < 0 else objective


def ppo(sequences, clip_low=0.2, clip_high=0.2, dual_clip=math.inf):
    return token_loss(
        sequences, lambda ratio, advantage, logprob: surrogate(ratio, advantage, clip_low, clip_high, dual_clip)
    )


def cispo(sequences, clip_low=1.0, clip_high=4.0):
    return token_loss(
        sequences, lambda ratio, advantage, logprob: min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage * logprob
    )


def dro(sequences, beta=0.05):
    return token_loss(
        sequences, lambda ratio, advantage, logprob: advantage * logprob - beta / 2 * math.log(ratio) ** 2
    )


def gspo(sequences, clip_low=3e-4, clip_high=4e-4):
    """GSPO: s = (pi(y) / pi_old(y)) ^ (1 / |y|), one ratio for every token of a sequence."""
    terms = []
    for sequence in sequences:
        trained = [t for t in range(len(sequence["mask"])) if sequence["mask"][t]]
        if trained:
            s = math.exp(math.fsum(sequence["policy"][t] - sequence["old"][t] for t in trained) / len(trained))
            terms += [
                sequence["weight"][t] * surrogate(s, sequence["advantage"][t], clip_low, clip_high) for t in trained
            ]
    return -math.fsum(terms)


def gate(ratio, tau):
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def sapo(sequences, tau_pos=1.0, tau_neg=1.05):
    """SAPO: f(r) A with f(r) = sigmoid(tau (r - 1)) x 4 / tau."""
    return token_loss(
        sequences, lambda ratio, advantage, logprob: gate(ratio, tau_pos if advantage > 0 else tau_neg) * advantage
    )


def total_variation(policy, old):
    return abs(math.exp(policy) - math.exp(old))


def binary_kl(policy, old):
    """KL of "the sampled token or another" under the old policy to the same under the policy."""
    rest_old, rest = (max(0.0, -math.expm1(logprob)) for logprob in (old, policy))
    of_rest = 0.0 if not rest_old else math.inf if not rest else rest_old * math.log(rest_old / rest)
    return math.exp(old) * (old - policy) + of_rest


def dppo_kept(policy, old, advantage, divergence, delta_low, delta_high):
    """DPPO: a token that moved the way its advantage pushes it, and too far, does not count."""
    if advantage > 0 and policy > old:
        return divergence(policy, old) <= delta_high
    if advantage < 0 and policy < old:
        return divergence(policy, old) <= delta_low
    return True


def dppo(sequences, divergence, delta_low, delta_high, cap, tau):
    """(-sum of weight x kept x min(ratio, cap) x A, plus tau x log-ratio^2; its gradient by the log-probabilities)."""
    terms, gradients = [], []
    for s in sequences:
        rows = zip(s["weight"], s["policy"], s["old"], s["advantage"], s["mask"])
        for weight, policy, old, advantage, mask in rows:
            kept = dppo_kept(policy, old, advantage, divergence, delta_low, delta_high) if mask else False
            surrogate = kept * min(math.exp(policy - old), cap) * advantage if mask else 0.0
            terms.append(-weight * surrogate + (weight * tau * (policy - old) ** 2 if mask else 0.0))
            gradients.append(-weight * surrogate + (weight * tau * 2 * (policy - old) if mask else 0.0))
    return math.fsum(terms), gradients


def dppo_tv(sequences, delta_low=0.2, delta_high=0.2, cap=math.inf, tau=0.0):
    return dppo(sequences, total_variation, delta_low, delta_high, cap, tau)[0]


def dppo_kl(sequences, delta_low=0.05, delta_high=0.05, cap=math.inf, tau=0.0):
    return dppo(sequences, binary_kl, delta_low, delta_high, cap, tau)[0]


def gmpo_ratio(sequence, log_clip_low, log_clip_high):
    """(s, which tokens have a clipped log-ratio): s = exp(1 / |o| sum of log-ratios, held on the side that pays)."""
    total, clipped = 0.0, []
    for t in range(len(sequence["mask"])):
        log_ratio = sequence["policy"][t] - sequence["old"][t] if sequence["mask"][t] else 0.0
        positive = sequence["advantage"][t] > 0
        bounded = min(log_ratio, log_clip_high) if positive else max(log_ratio, -log_clip_low)
        clipped.append(bounded != log_ratio)
        total += bounded
    return math.exp(total / max(1, sum(sequence["mask"]))), clipped


def gmpo(sequences, log_clip_low=0.4, log_clip_high=0.4):
    """GMPO: the geometric mean of a sequence's clipped ratios, times each token's advantage."""
    return -math.fsum(
        s["weight"][t] * gmpo_ratio(s, log_clip_low, log_clip_high)[0] * s["advantage"][t]
        for s in sequences
        for t in range(len(s["mask"]))
        if s["mask"][t]
    )


def vespo_factor(sequence, advantage, k_pos, lambda_pos, k_neg, lambda_neg):
    """phi(W) = W^k exp(lambda (1 - W)), with W the product of the sequence's ratios."""
    rows = zip(sequence["policy"], sequence["old"], sequence["mask"])
    log_weight = math.fsum(policy - old for policy, old, mask in rows if mask)
    k, lam = (k_pos, lambda_pos) if advantage >= 0 else (k_neg, lambda_neg)
    return math.exp(max(k * log_weight + lam * (1 - math.exp(log_weight)), -700.0))


def vespo_gradient(sequences, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    """-weight x phi(W) x A at trained tokens; the factor has no gradient."""
    return [
        [
            -w * vespo_factor(s, a, k_pos, lambda_pos, k_neg, lambda_neg) * a if m else 0.0
            for w, a, m in zip(s["weight"], s["advantage"], s["mask"])
        ]
        for s in sequences
    ]


def vespo(sequences, **config):
    """-sum of weight x phi(W) x A x log pi."""
    return math.fsum(
        g * logprob
        for s, gradient in zip(sequences, vespo_gradient(sequences, **config))
        for g, logprob in zip(gradient, s["policy"])
    )


# Gradients of losses by the policy's log-probabilities: a list of numbers per sequence.


def token_gradient(sequences, slope):
    """-weight x slope(ratio, advantage) at trained tokens, with the slope of the term by the log-probability."""
    return [
        [
            -s["weight"][t] * slope(math.exp(s["policy"][t] - s["old"][t]), s["advantage"][t]) if s["mask"][t] else 0.0
            for t in range(len(s["mask"]))
        ]
        for s in sequences
    ]


def sapo_gradient(sequences, tau_pos=1.0, tau_neg=1.05):
    """4 p (1 - p) r A with p = sigmoid(tau (r - 1))."""

    def slope(ratio, advantage):
        tau = tau_pos if advantage > 0 else tau_neg
        p, q = gate(ratio, tau) * tau / 4, 1 / (1 + math.exp(min(tau * (ratio - 1), 700.0)))  # q = 1 - p
        return 4 * p * q * ratio * advantage

    return token_gradient(sequences, slope)


def gmpo_gradient(sequences, log_clip_low=0.4, log_clip_high=0.4):
    """-weight x s x A where the log-ratio is not clipped, else 0."""
    gradients = []
    for sequence in sequences:
        s, clipped = gmpo_ratio(sequence, log_clip_low, log_clip_high)
        trained = [bool(m) and not c for m, c in zip(sequence["mask"], clipped)]
        gradients.append([-w * s * a * t for w, a, t in zip(sequence["weight"], sequence["advantage"], trained)])
    return gradients


# KL(policy || reference) of one token, d = log policy - log reference; r = reference / policy.


def k1(d):
    """-log r."""
    return d


def k2(d):
    return d * d / 2


def k3(d):
    """r - 1 - log r. Where that would cancel, its series in d."""
    if abs(d) < 1e-2:
        return math.fsum((-d) ** n / math.factorial(n) for n in range(2, 12))
    return math.exp(-d) - 1 + d


# Importance weights trainer / generator, per token, for every kind of correction.


def correction(sequences, kind, level, low=0.0, high=math.inf):
    factors = []
    for sequence in sequences:
        rhos = [
            math.exp(old - sampling) if mask else 1.0
            for old, sampling, mask in zip(sequence["old"], sequence["sampling"], sequence["mask"])
        ]
        if level == "sequence":
            rhos = [float(np.prod(rhos))] * len(rhos)
        factors.append([min(rho, high) if kind == "truncated" else rho if low <= rho <= high else 0.0 for rho in rhos])
    return factors


# Reductions: the mean a loss becomes, from one number per token.


def token_mean(losses, masks, groups):
    trained = [x for loss, mask in zip(losses, masks) for x, m in zip(loss, mask) if m]
    return math.fsum(trained) / max(1, len(trained))


def sequence_mean(losses, masks, groups):
    of_sequence = [token_mean([loss], [mask], [0]) for loss, mask in zip(losses, masks)]
    return mean(of_sequence)


def prompt_mean(losses, masks, groups):
    return mean(
        [
            token_mean(
                [loss for loss, g in zip(losses, groups) if g == group],
                [mask for mask, g in zip(masks, groups) if g == group],
                [],
            )
            for group in sorted(set(groups))
        ]
    )


def constant_length(losses, masks, groups, length):
    """Dr. GRPO: the sum over a sequence's tokens divided by a constant, and the mean of that over sequences."""
    return mean([math.fsum(x for x, m in zip(loss, mask) if m) / length for loss, mask in zip(losses, masks)])
