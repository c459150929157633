"""The papers' formulas in plain Python, one number at a time: what ours must give where a reference is wrong.

Rows are lists of floats; a mask is a list of rows of 0 and 1. Nothing here uses r1-core.
"""

import math


def scores(token_rewards):
    return [math.fsum(row) for row in token_rewards]


def mean(values):
    return math.fsum(values) / len(values) if values else 0.0


def variance(values, unbiased=True):
    if len(values) <= unbiased or len(set(values)) == 1:
        return 0.0
    middle = mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - unbiased)


def by_group(rewards, names, judge):
    """judge(reward, the rewards of its group) for each answer; 0 in a group of equal rewards, as in one of one."""
    found = []
    for reward, name in zip(rewards, names, strict=True):
        group = [other for other, its in zip(rewards, names, strict=True) if its == name]
        found.append(0.0 if len(set(group)) == 1 else judge(reward, group))
    return found


def grpo(eps=0.0, norm_by_std=True):
    return lambda reward, group: (reward - mean(group)) / (math.sqrt(variance(group)) + eps if norm_by_std else 1.0)


def rloo(reward, group):
    return reward - (math.fsum(group) - reward) / (len(group) - 1)


def passk(eps, norm_by_std=True):
    def judge(reward, group):
        best, second = sorted(group)[:-3:-1]
        scale = math.sqrt(variance(group)) + eps if norm_by_std else 1.0
        return (best - second) / scale if reward == best else 0.0

    return judge


def opo(rewards, names, lengths):
    """The baseline is the mean weighed by length, so it needs the lengths of the group."""
    found = []
    for reward, name in zip(rewards, names, strict=True):
        group = [(r, n) for r, n, its in zip(rewards, lengths, names, strict=True) if its == name]
        total = sum(n for _, n in group)
        equal = len({r for r, _ in group}) == 1
        found.append(0.0 if equal or not total else reward - math.fsum(r * n for r, n in group) / total)
    return found


def spread(values, mask):
    """Each answer's number on each of its tokens."""
    return [[value * shown for shown in row] for value, row in zip(values, mask, strict=True)]


def at_last_token(values, mask):
    rows = []
    for value, row in zip(values, mask, strict=True):
        last = max((t for t, shown in enumerate(row) if shown), default=-1)
        rows.append([value if t == last else 0.0 for t in range(len(row))])
    return rows


def returns(token_rewards, mask, gamma):
    """G_t = r_t + gamma · G of the next trained token."""
    rows = []
    for rewards, shown in zip(token_rewards, mask, strict=True):
        row, following = [0.0] * len(rewards), 0.0
        for t in reversed([t for t, on in enumerate(shown) if on]):
            row[t] = following = rewards[t] + gamma * following
        rows.append(row)
    return rows


def gae(token_rewards, values, mask, gamma, lam):
    """A_t = r_t + gamma · V_next − V_t + gamma · lam · A_next, next being the next trained token; and A + V."""
    rows, sums = [], []
    for rewards, forecast, shown in zip(token_rewards, values, mask, strict=True):
        row, total, later, ahead = [0.0] * len(rewards), [0.0] * len(rewards), 0.0, 0.0
        for t in reversed([t for t, on in enumerate(shown) if on]):
            row[t] = later = rewards[t] + gamma * ahead - forecast[t] + gamma * lam * later
            total[t], ahead = later + forecast[t], forecast[t]
        rows.append(row)
        sums.append(total)
    return rows, sums


def trained(rows, mask):
    pairs = zip(rows, mask, strict=True)
    return [value for row, shown in pairs for value, on in zip(row, shown, strict=True) if on]


def whiten(rows, mask, *, unbiased=True, eps=1e-8, shift=True, scale=True):
    """(x − mean) / sqrt(variance + eps) over the trained tokens; / sqrt(max(variance, eps)) if not unbiased."""
    tokens = trained(rows, mask)
    middle, spread_ = mean(tokens), variance(tokens, unbiased)
    width = math.sqrt(spread_ + eps if unbiased else max(spread_, eps)) if scale else 1.0
    low = min(tokens, default=0.0)
    if max(tokens, default=0.0) == low:
        middle = low
    back = 0.0 if shift else middle
    return [[(value - middle) / width + back for value in row] for row in rows]


def kl(name, policy, reference):
    """The estimate and its derivative in the policy's log-prob, of one token."""
    gap = policy - reference
    sign = (gap > 0) - (gap < 0)
    if -gap > 20.0:  # from here on a straight line, whose slope joins on
        third = (math.exp(20.0) * (1.0 - gap - 20.0) - 1.0 + gap, 1.0 - math.exp(20.0))
    else:
        third = (math.exp(-gap) - 1.0 + gap, 1.0 - math.exp(-gap))
    kinds = {"k1": (gap, 1.0), "abs": (abs(gap), float(sign)), "k2": (gap * gap / 2, gap), "k3": third}
    kinds |= {"k1+": (gap, gap), "k3+": (third[0], gap)}
    return kinds[{"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(name, name)]


def overlong(length, maximum, buffer, factor):
    return -factor * min(max((length - (maximum - buffer)) / buffer, 0.0), 1.0)


def entropy(logits):
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return -math.fsum(w / total * (logit - top - math.log(total)) for w, logit in zip(weights, logits, strict=True))


def entropy_gradient(logits):
    """dH/dz_k = −p_k · (log p_k + H)."""
    top, whole = max(logits), entropy(logits)
    total = math.fsum(math.exp(logit - top) for logit in logits)
    logs = [logit - top - math.log(total) for logit in logits]
    return [-math.exp(log) * (log + whole) for log in logs]


def clamp(value, low, high):
    return min(max(value, low), high)
