"""The mathematics once more, in plain NumPy and exact fractions: one token, one sequence, one group at a time.

Written from the formulas, not from the package, and slow on purpose. Inputs are float64 arrays; padding is never read.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np

ROUNDING = 1e-6
"""Statistics whose spread is below this, relative to max(1, size), are of equal values."""


def tokens_of(mask, i):
    return [t for t in range(mask.shape[1]) if mask[i, t] > 0]


def members(group, i):
    return [j for j in range(len(group)) if group[j] == group[i]]


def exact(fraction):
    """0.2 means two tenths."""
    return Fraction(str(fraction))


def grpo(rewards, group, scale):
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        mine = [rewards[j] for j in members(group, i)]
        pool = mine if scale == "group" else list(rewards)
        mean = math.fsum(mine) / len(mine)
        centre = math.fsum(pool) / len(pool)
        squares = math.fsum((r - centre) ** 2 for r in pool)
        std = math.sqrt(squares / (len(pool) - 1)) if len(pool) > 1 else 0.0
        out[i] = rewards[i] - mean
        if scale != "none":
            out[i] /= std + 1e-4
    return out


def ppl(advantages, logps, mask, group, alpha, direction, clamp):
    out = np.zeros_like(advantages)
    log_ppl = {}
    for i in range(len(group)):
        own = tokens_of(mask, i)
        if own:
            log_ppl[i] = -math.fsum(logps[i, t] for t in own) / len(own)
    for i in log_ppl:
        peers = [log_ppl[j] for j in members(group, i) if j in log_ppl]
        mu = math.fsum(peers) / len(peers)
        sigma = math.sqrt(math.fsum((x - mu) ** 2 for x in peers) / len(peers))
        z = 0.0 if sigma <= ROUNDING * max(1.0, abs(mu)) else (log_ppl[i] - mu) / sigma
        factor = 1 - alpha * z if direction == 1 else 1 + alpha * z
        if clamp is not None:
            factor = min(max(factor, clamp[0]), clamp[1])
        for t in tokens_of(mask, i):
            out[i, t] = advantages[i, t] * factor
    return out


def position(advantages, mask, gamma, direction, slope, shift, cap):
    out = np.zeros_like(advantages)
    for i in range(len(mask)):
        own = tokens_of(mask, i)
        for index, t in enumerate(own):
            x = direction * slope * (index / len(own) - shift)
            bonus = gamma / (1 + math.exp(-x))
            a = advantages[i, t]
            if cap is not None and bonus > cap * abs(a):
                bonus = cap * abs(a)
            out[i, t] = a + bonus if a > 0 else a - bonus if a < 0 else 0.0
    return out


def entropy_bonus(advantages, entropy, mask, alpha, kappa):
    out = np.zeros_like(advantages)
    for i in range(len(mask)):
        for t in tokens_of(mask, i):
            a = advantages[i, t]
            out[i, t] = a + min(alpha * entropy[i, t], abs(a) / kappa)
    return out


def signed(correctness, correct, positive, negative):
    out = np.zeros(len(correctness))
    for i, r in enumerate(correctness):
        if math.isnan(r):
            continue
        out[i] = positive * r if correct[i] else -negative * max(0.0, 1 - r)
    return out


def passk(correct, scored, group, k):
    """Straight from its meaning: draw every set of k answers, its reward is its best; in exact fractions."""
    out = np.zeros(len(correct))
    for i in range(len(correct)):
        mine = [j for j in members(group, i) if scored[j]]
        n, c = len(mine), sum(bool(correct[j]) for j in mine)
        if n < k or not scored[i]:
            continue
        rho = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
        sigma = math.sqrt(rho * (1 - rho))
        # mean reward of the sets that hold this answer: 1 if it is right, else that of its k − 1 companions
        with_it = Fraction(1)
        if not correct[i]:
            with_it -= Fraction(math.comb(n - c - 1, k - 1), math.comb(n - 1, k - 1))
        out[i] = float(with_it - rho) / (sigma + 1e-6)
    return out


def maxrl(rewards, group):
    """Rewards over their mean, less 1, in exact fractions."""
    out = np.zeros(len(rewards))
    for i, r in enumerate(rewards):
        mine = [Fraction(float(rewards[j])) for j in members(group, i) if not math.isnan(rewards[j])]
        if math.isnan(r) or sum(mine) <= Fraction(1, 10**6) * sum(map(abs, mine)):
            continue
        out[i] = Fraction(float(r)) * len(mine) / sum(mine) - 1
    return out


def pkpo(rewards, group, k):
    """Straight from its meaning: what each set of k loses with the answer, summed over the sets that hold it."""
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        mine = [j for j in members(group, i) if not math.isnan(rewards[j])]
        n = len(mine)
        if i not in mine or n < k or n < 2:
            continue
        r = {j: Fraction(float(rewards[j])) for j in mine}
        if k == 1:
            out[i] = r[i] - sum(r[j] for j in mine if j != i) / (n - 1)
            continue
        sets = [chosen for chosen in itertools.combinations(mine, k) if i in chosen]
        lost = sum(max(r[j] for j in chosen) - max(r[j] for j in chosen if j != i) for chosen in sets)
        out[i] = n * lost / math.comb(n, k)
    return out


def risk_sensitive(rewards, group, beta):
    out = np.zeros(len(rewards))
    for i, r in enumerate(rewards):
        mine = [rewards[j] for j in members(group, i) if not math.isnan(rewards[j])]
        if math.isnan(r):
            continue
        if beta == 0:
            out[i] = r - math.fsum(mine) / len(mine)
        else:
            mean = math.fsum(math.exp(beta * other) for other in mine) / len(mine)
            out[i] = (math.exp(beta * r) / mean - 1) / beta
    return out


def quantile(rewards, group, share_below):
    out = np.zeros(len(rewards))
    for i, r in enumerate(rewards):
        mine = [rewards[j] for j in members(group, i) if not math.isnan(rewards[j])]
        if math.isnan(r):
            continue
        below = {x: Fraction(sum(other <= x for other in mine), len(mine)) for x in mine}
        baseline = min(x for x in mine if below[x] >= exact(share_below))
        centre = math.fsum(mine) / len(mine)
        squares = math.fsum((other - centre) ** 2 for other in mine)
        std = math.sqrt(squares / (len(mine) - 1)) if len(mine) > 1 else 0.0
        out[i] = (r - baseline) / (std + 1e-4)
    return out


def ranks(values):
    """Of a dict of values: how many lie below, the mean of it over those that follow each other within rounding."""
    out, tie = {}, []
    for i in [*sorted(values, key=values.get), None]:
        if tie and (i is None or values[i] - values[tie[-1]] > ROUNDING * max(1.0, abs(values[tie[-1]]))):
            out |= dict.fromkeys(tie, len(out) + (len(tie) - 1) / 2)
            tie = []
        tie.append(i)
    return out


def unlikeliness(rewards, correct, logps, mask, group, beta, level):
    out = np.array(rewards, dtype=float)
    for i, r in enumerate(rewards):
        scored = [j for j in members(group, i) if not math.isnan(rewards[j])]
        logp = {j: math.fsum(logps[j, t] for t in tokens_of(mask, j)) for j in scored if tokens_of(mask, j)}
        if i not in logp or not correct[i] or r < 0 or all(correct[j] for j in scored):
            continue
        if level == "token":
            logp = {j: value / len(tokens_of(mask, j)) for j, value in logp.items()}
        out[i] = r * (1 - beta * ranks(logp)[i] / len(logp))
    return out


def ucpo(advantages, right, logps, mask, group, tau):
    out = np.zeros_like(advantages)
    for i in range(len(mask)):
        own, factor = tokens_of(mask, i), 1.0
        if right[i] and own:
            peers = [j for j in members(group, i) if right[j] and tokens_of(mask, j)]
            mean = {j: math.fsum(logps[j, t] for t in tokens_of(mask, j)) / len(tokens_of(mask, j)) for j in peers}
            top = max(mean.values())
            whole = math.fsum(math.exp(value - top) for value in mean.values())
            q = {j: math.exp(value - top) / whole for j, value in mean.items()}
            inverse = math.fsum(1 / value for value in q.values())
            factor = len(peers) * ((1 - tau) / len(peers) + tau / q[i] / inverse)
        for t in own:
            out[i, t] = advantages[i, t] * (factor if advantages[i, t] > 0 else 1.0)
    return out


def egsw(advantages, entropy, mask, alpha, temperature, level, mode, scale):
    rows = len(mask)
    out = np.zeros_like(advantages)
    if level == "token":
        cells = {(i, t): (advantages[i, t], entropy[i, t]) for i in range(rows) for t in tokens_of(mask, i)}
    else:
        cells = {}
        for i in range(rows):
            own = tokens_of(mask, i)
            if own:
                mean = math.fsum(advantages[i, t] for t in own) / len(own)
                cells[i, 0] = (mean, math.fsum(entropy[i, t] for t in own))
    if not cells:
        return out
    low, high = min(h for _, h in cells.values()), max(h for _, h in cells.values())
    score = {}
    for cell, (a, h) in cells.items():
        if mode == "normalized":
            h = 0.0 if high - low <= ROUNDING * max(1.0, abs(high)) else (h - low) / (high - low)
        score[cell] = (a + alpha * h) / temperature
    for i, t in score:
        rivals = [score[j, u] for j, u in score if u == t]
        weight = 1 / math.fsum(math.exp(min(other - score[i, t], 700.0)) for other in rivals)
        if scale == "mean_one":
            weight *= len(rivals)
        for u in [t] if level == "token" else tokens_of(mask, i):
            out[i, u] = weight
    return out


def forking(entropy, mask, fraction):
    """The quantile by linear interpolation between the order statistics, in exact fractions."""
    values = sorted(Fraction(float(entropy[i, t])) for i in range(len(mask)) for t in tokens_of(mask, i))
    out = np.zeros_like(entropy)
    if not values:
        return out
    position = (1 - exact(fraction)) * (len(values) - 1)
    lower = math.floor(position)
    upper = min(lower + 1, len(values) - 1)
    threshold = values[lower] + (position - lower) * (values[upper] - values[lower])
    for i in range(len(mask)):
        for t in tokens_of(mask, i):
            out[i, t] = Fraction(float(entropy[i, t])) >= threshold
    return out


def covariance(advantages, logps, mask):
    places = [(i, t) for i in range(len(mask)) for t in tokens_of(mask, i)]
    out = np.zeros_like(advantages)
    if places:
        mean_a = math.fsum(advantages[p] for p in places) / len(places)
        mean_l = math.fsum(logps[p] for p in places) / len(places)
        for p in places:
            out[p] = (advantages[p] - mean_a) * (logps[p] - mean_l)
    return out


def share(fraction, tokens):
    return 0 if tokens == 0 else max(1, math.floor(exact(fraction) * tokens))


def gate(values, scored, group, threshold, level):
    """Whether each row stays: the mean over the scored answers of its group, or of the batch, against the threshold."""
    out = np.zeros(len(values), dtype=bool)
    for i in range(len(values)):
        pool = members(group, i) if level == "group" else range(len(values))
        scores = [Fraction(float(values[j])) for j in pool if scored[j]]
        mean = sum(scores) / len(scores) if scores else Fraction(0)
        out[i] = mean >= exact(threshold) - Fraction(1, 10**6)
    return out


def running_rates(batches, decay, start):
    """Solve rates after batches of (prompts, correct, correctness): per prompt, and over all answers."""
    rates, overall = dict(start), None
    for prompts, correct, correctness in batches:
        answers = [(p, bool(c)) for p, c, r in zip(prompts, correct, correctness, strict=True) if not math.isnan(r)]
        for prompt in {p for p, _ in answers}:
            own = [c for p, c in answers if p == prompt]
            now = own.count(True) / len(own)
            rates[prompt] = now if prompt not in rates else decay * rates[prompt] + (1 - decay) * now
        if answers:
            now = [c for _, c in answers].count(True) / len(answers)
            overall = now if overall is None else decay * overall + (1 - decay) * now
    return rates, overall


def truncated(pi, allowed):
    """π on the kept tokens, renormalised: what top-p, top-k, min-p and bottom-p sample from."""
    mass = math.fsum(p for p, keep in zip(pi, allowed, strict=True) if keep)
    return np.array([p / mass if keep else 0.0 for p, keep in zip(pi, allowed, strict=True)])


def bottom_p(pi, p):
    """Which tokens bottom-p keeps of a distribution; of equally likely ones the earlier goes first."""
    keep, mass = [True] * len(pi), 0.0
    order = sorted(range(len(pi)), key=lambda j: -pi[j])
    for j in order[:-1]:
        mass += pi[j]
        keep[j] = mass > 1 - p
    return keep


def importance(old, sampling, mask, cap):
    out = np.zeros_like(old)
    for i in range(len(mask)):
        for t in tokens_of(mask, i):
            out[i, t] = min(math.exp(min(old[i, t] - sampling[i, t], 700.0)), cap)
    return out


def overlong(lengths, longest, cache):
    out = []
    for length in lengths:
        if length <= longest - cache:
            out.append(0.0)
        elif length <= longest:
            out.append(float(Fraction(longest - cache - int(length), cache)))
        else:
            out.append(-1.0)
    return np.array(out)


def ucb(counts, outcome, group, baseline, constant):
    """An outcome of −1 is no answer."""
    bonus = [1.0 if n == 0 else min(1.0, 1 / math.sqrt(n)) for n in counts]
    out = np.zeros(len(counts))
    for i in range(len(counts)):
        if outcome[i] < 0:
            continue
        peers = [bonus[j] for j in members(group, i) if outcome[j] >= 0]
        out[i] = bonus[i] - {"none": 0.0, "mean": math.fsum(peers) / len(peers), "constant": constant}[baseline]
    return out


def repetition(outcome, group):
    out = np.zeros(len(group))
    for i in range(len(group)):
        if outcome[i] >= 0:
            same = sum(outcome[j] == outcome[i] for j in members(group, i) if j != i)
            out[i] = float(-Fraction(same, len(members(group, i))))
    return out


def annealed(t, highest, lowest, decay, warmup):
    if t < warmup:
        return 1.0
    fallen = t / decay > 50 or 1 + highest - math.exp(t / decay) < lowest
    return lowest if fallen else 1 + highest - math.exp(t / decay)


def shielded(advantages, logps, mass, mask, fraction):
    out = np.zeros_like(mask)
    punished = [(i, t) for i in range(len(mask)) for t in tokens_of(mask, i) if advantages[i, t] < 0]
    count = min(len(punished), max(1, math.floor(exact(fraction) * len(punished))))
    for i, t in sorted(punished, key=lambda index: logps[index])[:count]:
        out[i, t] = float(mass[i, t] > 0)
    return out


def proxy(logp, old_logp, mass):
    """Of a chosen token."""
    gap = old_logp - math.log(mass) - logp
    return min(math.exp(gap) - gap - 1, 10.0) if gap > 0 else 0.0
