"""Sampling, stage by stage, as a textbook has it: sort, add up, cut.

A row is an array of keys (see sample_math.py): a stage takes one and returns one with more tokens
excluded. Adjustments work on the logits themselves, in single precision. These functions define what
the kernels must do; ``sampling/reference.py`` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels import sample_math as math_
from xinfer_vk.kernels.sample_math import EXCLUDED, TINY, Scale

# -- adjustments: f32 in, f32 out ---------------------------------------------------------------------


@dataclass(frozen=True)
class Penalties:
    """Factors in single precision. ``repetition`` > 1 makes seen tokens less likely."""

    repetition: np.float32
    repetition_inverse: np.float32
    presence: np.float32
    frequency: np.float32


def settle(x: np.ndarray) -> np.ndarray:
    """Results below 2^-100 are zero, since devices differ in what becomes of denormal numbers."""
    return np.where(np.abs(x) < TINY, np.float32(0), x)


def scale_logits(logits: np.ndarray, inverse_temperature: np.float32) -> np.ndarray:
    """Logits at a temperature, for adjustments that come after it."""
    return np.where(np.isneginf(logits), logits, settle(logits * inverse_temperature))


def penalise(logits: np.ndarray, history: np.ndarray, penalties: Penalties) -> np.ndarray:
    """Lower the logits of tokens that occur in ``history``.

    Repetition (Keskar et al. 2019, CTRL): positive logits are divided by the factor, the others
    multiplied. Presence and frequency: minus the one, minus the other times the number of occurrences.
    """
    tokens, counts = np.unique(history[history < logits.size], return_counts=True)
    x = logits[tokens]
    factor = np.where(x > 0, penalties.repetition_inverse, penalties.repetition)
    penalty = penalties.presence + penalties.frequency * counts.astype(np.float32)
    lowered = settle(x * factor - penalty)
    out = logits.copy()
    out[tokens] = np.where(np.isneginf(x), x, lowered)
    return out


def add_bias(logits: np.ndarray, tokens: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Add to the logits of some tokens; -inf bans one, whatever its logit."""
    x = logits[tokens]
    changed = np.where(np.isneginf(bias), np.float32(-np.inf), settle(x + bias))
    out = logits.copy()
    out[tokens] = np.where((bias == 0) | ~np.isfinite(x), x, changed)
    return out


# -- truncations: keys in, keys out ---------------------------------------------------------------------


def candidates(keys: np.ndarray) -> np.ndarray:
    """Tokens that can be chosen, the largest logit first, the lowest id first among equals."""
    tokens = np.flatnonzero(keys != EXCLUDED)
    return tokens[np.argsort(~keys[tokens], kind="stable")]


def only(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The same keys, with all but some tokens excluded."""
    kept = np.full_like(keys, EXCLUDED)
    kept[tokens] = keys[tokens]
    return kept


def row_weights(keys: np.ndarray, tokens: np.ndarray, scale: Scale) -> np.ndarray:
    """Weights of some tokens; their sum over all candidates is what probabilities are parts of."""
    return math_.weights(math_.distances(keys[tokens], int(keys.max()), scale), scale)


def shortest_prefix(weights: np.ndarray, part: int) -> int:
    """How many of the first weights it takes to reach ``part * 2^-32`` of their sum: at least one."""
    so_far = np.cumsum(weights)
    return int(np.searchsorted(so_far, np.uint64(math_.mass_needed(part, int(so_far[-1]))))) + 1


def top_k(keys: np.ndarray, k: int) -> np.ndarray:
    """The ``k`` most likely tokens."""
    if np.count_nonzero(keys) <= k:
        return keys
    # a number that orders as (larger key, lower id) does: no need to sort them all
    order = (~keys).astype(np.uint64) << np.uint64(32) | np.arange(keys.size, dtype=np.uint64)
    return only(keys, np.flatnonzero(order <= np.partition(order, k - 1)[k - 1]))


def top_p(keys: np.ndarray, part: int, scale: Scale) -> np.ndarray:
    """Nucleus sampling (Holtzman et al. 2020): the fewest tokens, the most likely first, that hold a part of
    the probability."""
    tokens = candidates(keys)
    return only(keys, tokens[: shortest_prefix(row_weights(keys, tokens, scale), part)])


def min_p(keys: np.ndarray, farthest: int, scale: Scale) -> np.ndarray:
    """Min-p (Nguyen et al. 2024): tokens whose probability is at least a part of the largest one, which
    is to say within a distance of it."""
    tokens = np.flatnonzero(keys)
    near = math_.distances(keys[tokens], int(keys.max()), scale) <= farthest
    return only(keys, tokens[near])


def typical(keys: np.ndarray, part: int, scale: Scale) -> np.ndarray:
    """Locally typical sampling (Meister et al. 2023): the fewest tokens, those first whose surprise is
    nearest to the entropy, that hold a part of the probability.

    Surprise is distance plus the logarithm of the sum of weights, entropy is mean distance plus the same;
    so what orders the tokens is how far their distance is from the mean distance.
    """
    tokens = np.flatnonzero(keys)
    distance = math_.distances(keys[tokens], int(keys.max()), scale)
    tokens, distance = tokens[distance <= scale.last], distance[distance <= scale.last]
    weights = math_.weights(distance, scale)
    order = np.argsort(np.abs(distance - mean_distance(weights, distance)), kind="stable")
    return only(keys, tokens[order[: shortest_prefix(weights[order], part)]])


def mean_distance(weights: np.ndarray, distance: np.ndarray) -> int:
    """Sum of weight times distance over the sum of weights, in whole units. Products are taken in units of
    2^32, so that they stay in 64 bits."""
    low, high = weights & np.uint64(0xFFFFFFFF), weights >> np.uint64(32)
    products = high * distance.astype(np.uint64) + (low * distance.astype(np.uint64) >> np.uint64(32))
    return (int(products.sum()) << 32) // int(weights.sum())


# -- the draw ---------------------------------------------------------------------------------------------


def draw(keys: np.ndarray, scale: Scale, random: int) -> int:
    """The token in whose share of the weights, laid side by side in the order of ids, the random number
    falls. ``random``: 64 bits."""
    tokens = np.flatnonzero(keys)
    so_far = np.cumsum(row_weights(keys, tokens, scale))
    target = np.uint64(math_.threshold(random, int(so_far[-1])))
    return int(tokens[np.searchsorted(so_far, target, side="right")])
