"""From the log-probs of a reference answer to a reward in [0, 1]: aggregation, shaping and bins of RLPR.

RLPR is arXiv 2506.18254. Names of settings are those of its two public implementations, so that their configurations
keep their meaning; parameters stand in the name, as in "threshold_0.1".
"""

import math
import random
from collections.abc import Callable, Sequence

AGGREGATIONS = ("mean_exp_log_softmax", "mean_log_softmax", "exp_sum_log_softmax", "exp_mean_log_softmax")
SHAPINGS = (
    "identity", "one_minus", "random", "threshold_T", "leaky_T", "sigmoid_K", "comp_threshold_T_sigmoid_K",
    "comp_threshold_T_sigmoidv2_K", "comp_threshold_T_sigmoidv2fixed_K", "comp_threshold_T_sigmoidv3_K",
    "comp_threshold_T_tanh_K",
)  # fmt: skip

Shaping = Callable[[float], float]


def aggregate(logprobs: Sequence[float], aggregation: str) -> float:
    """Return one number for the reference's log-probs l_1 … l_m (natural logarithm); 0 for none, NaN for NaN.

    `mean_exp_log_softmax` (RLPR) is the mean of exp(l); `mean_log_softmax` the mean of l; `exp_sum_log_softmax` the
    probability of the whole answer; `exp_mean_log_softmax` its geometric mean. Raises ValueError for another name.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; it must be one of {', '.join(AGGREGATIONS)}")
    if not logprobs:
        return 0.0
    mean_log = sum(logprobs) / len(logprobs)
    if aggregation == "mean_log_softmax":
        return mean_log
    if aggregation == "mean_exp_log_softmax":
        return sum(_exp(logprob) for logprob in logprobs) / len(logprobs)
    return _exp(sum(logprobs) if aggregation == "exp_sum_log_softmax" else mean_log)


def shaping(name: str) -> Shaping:
    """Return the function that `name` describes, from a score x to a shaped one.

    With t and k the numbers in the name and σ the logistic function: `identity` x; `one_minus` 1 − x; `random` uniform
    in [0, 1); `threshold_t` 0 below t, else x; `leaky_t` 0.01 x below t, else x; `sigmoid_k` σ(k(2x − 1)), or σ(x) for
    k = 0. `comp_threshold_t_KIND_k`: `sigmoid` sigmoid_k(x), or 0 where that is below t; `tanh` likewise with
    (tanh(kx − k/2) + 1)/2; `sigmoidv2` 0 below t, else σ(k(x − t)); `sigmoidv2fixed` 0 below t, else
    2(1 − t) σ(k(x − t)) − (1 − 2t), which is t at t; `sigmoidv3` 0 below t, else σ(k(x − 1)) + 0.5. NaN stays NaN.
    Raises ValueError for another name.
    """
    if name == "identity":
        return lambda x: x
    if name == "one_minus":
        return lambda x: 1.0 - x
    if name == "random":
        return lambda x: random.random()
    kind, _, rest = name.partition("_")
    try:
        if kind == "threshold":
            return _threshold(float(name.rsplit("_", 1)[-1]))
        if kind == "sigmoid":
            return _sigmoid(float(name.rsplit("_", 1)[-1]))
        if kind == "leaky":
            return _leaky(float(rest.split("_")[0]))
        if name.startswith("comp_threshold_"):
            low, compound, steepness = name.removeprefix("comp_threshold_").split("_")
            return _compound(compound, float(low), float(steepness))
    except ValueError as error:
        raise ValueError(f"shaping {name!r} lacks its numbers, as in threshold_0.1 ({error})") from error
    raise ValueError(f"shaping is {name!r}; it must be one of {', '.join(SHAPINGS)}")


def bins(name: str) -> Shaping:
    """Return the rounding that `name` describes: "identity", or "bin_N" to the nearest N-th, halves to even.

    Raises ValueError for another name and for fewer than one bin.
    """
    if name == "identity":
        return lambda x: x
    prefix, _, count = name.rpartition("_")
    if prefix != "bin" or not count.isdecimal() or int(count) < 1:
        raise ValueError(f"discrete_function_name is {name!r}; it must be identity or bin_N with N of at least 1")
    number = int(count)
    return lambda x: round(x * number) / number if math.isfinite(x) else x


def _threshold(low: float) -> Shaping:
    return lambda x: 0.0 if x < low else x


def _leaky(low: float) -> Shaping:
    return lambda x: 0.01 * x if x < low else x


def _sigmoid(steepness: float) -> Shaping:
    return lambda x: _logistic(x if steepness == 0 else steepness * (2.0 * x - 1.0))


def _compound(kind: str, low: float, steepness: float) -> Shaping:
    sigmoid = _sigmoid(steepness)
    inner: dict[str, Shaping] = {
        "sigmoid": sigmoid,
        "tanh": lambda x: (math.tanh(steepness * x - steepness / 2.0) + 1.0) / 2.0,
        "sigmoidv2": lambda x: _logistic(steepness * (x - low)),
        "sigmoidv2fixed": lambda x: _logistic(steepness * (x - low)) * 2.0 * (1.0 - low) - (1.0 - 2.0 * low),
        "sigmoidv3": lambda x: _logistic(steepness * (x - 1.0)) + 0.5,
    }
    if kind not in inner:
        raise ValueError(f"{kind!r} is none of {', '.join(inner)}")
    shape = inner[kind]
    if kind in ("sigmoid", "tanh"):
        return lambda x: 0.0 if shape(x) < low else shape(x)
    return lambda x: 0.0 if x < low else shape(x)


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + _exp(-x))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
