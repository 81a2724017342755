"""The sampler's arithmetic, which every device and NumPy do alike, bit for bit.

A sampler that chooses by floats chooses differently on each device: exponentials differ in the last
bits, and sums differ with their order. Here everything after the logits is integers:

*key* (``uint32``)
    A logit's place in the order of floats; 0 for a token that cannot be chosen (-inf, banned, or cut
    off by an earlier stage), 0xFFFFFFFF for NaN and +inf. Equal logits have equal keys, ties go by token id.
*distance* (31 bits)
    How far a logit is below the largest, ``(top - x) * 2^F``. The subtraction is one f32 operation,
    rounded to nearest; the scaling by a power of two and the truncation are exact.
*weight* (45 bits)
    ``2^44 * exp(-(top - x) / temperature)`` from integer multiplications. *The probability of a token is
    its weight divided by the sum of the weights*: this is the definition, for all paths. Sums of
    integers do not depend on their order, so cuts and draws are the same everywhere.

Compared with an exact softmax, weights err by less than 2^-18 of themselves, and by 2^-44 of the
largest where they are tiny: tokens below 6e-14 of the most probable one have no weight.
``shaders/include/sample.glsl`` is the same arithmetic on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from xinfer_vk.kernels.argmax import MINUS_INFINITY_KEY, order_keys

EXCLUDED = 0  # key of a token that cannot be chosen
NAN_KEY = 0xFFFFFFFF

FAR = (1 << 31) - 1  # the distance of everything that is too far to have a weight
WEIGHT_BITS = 44  # the weight of the largest logit is 1 << 44
MAX_VOCABULARY = 1 << 19  # so that sums of weights stay in 64 bits
TINY = np.float32(2.0**-100)  # results of arithmetic on logits that are smaller become zero

# 2^-f = 1 - c1 f + c2 f² - …  on [0, 1], in units of 2^-32: minimax fit of degree 6, relative error 2^-28.8
EXP2_COEFFICIENTS = (2977043973, 1031755803, 238330987, 41142264, 5475002, 468251)
EXPONENT_BITS = 25  # fraction bits of the binary exponent
_MASK32 = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True)
class Scale:
    """How distances at one temperature become weights.

    ``factor``: ``2^F``, logit units to distance units. ``multiplier``: distance units to binary exponents,
    ``log2(e) / temperature * 2^(56 - F)``. ``last``: the largest distance that has a weight.
    """

    factor: float
    multiplier: int
    last: int

    @classmethod
    def of(cls, temperature: float) -> Scale:
        """The scale whose 31 bits reach just as far as weights do: 45 binary orders below the top."""
        bits = 26
        while 2.0 ** (31 - bits) < 31.2 * temperature:
            bits -= 1
        while 2.0 ** (30 - bits) >= 31.2 * temperature:
            bits += 1
        multiplier = round(1 / math.log(2) / temperature * 2.0 ** (31 + EXPONENT_BITS - bits))
        last = (((WEIGHT_BITS << EXPONENT_BITS) + 1 << 32) - 1) // (2 * multiplier)
        return cls(2.0**bits, multiplier, last)


def keys_of(logits: np.ndarray) -> np.ndarray:
    """Keys of ``float32`` logits, ``uint32`` of the same shape."""
    keys = order_keys(np.ascontiguousarray(logits, np.float32).view(np.uint32))
    return np.where(keys == MINUS_INFINITY_KEY, np.uint32(EXCLUDED), keys)


def logits_of(keys: np.ndarray) -> np.ndarray:
    """The ``float32`` logits of keys; -inf for what is excluded."""
    keys = np.where(keys == EXCLUDED, np.uint32(MINUS_INFINITY_KEY), keys).astype(np.uint32)
    return np.where(keys >> 31 != 0, keys ^ np.uint32(0x80000000), ~keys).astype(np.uint32).view(np.float32)


def distances(keys: np.ndarray, top: int, scale: Scale) -> np.ndarray:
    """Distances of logits from the one whose key is ``top``, ``int64``; :data:`FAR` where excluded."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        below = logits_of(np.uint32(top).reshape(1)) - logits_of(keys)  # f32, rounded once
        scaled = below * np.float32(scale.factor)
        steps = np.where(scaled < 2.0**31, scaled, 0).astype(np.int64)
    steps = np.where(scaled < 2.0**31, steps, FAR)
    steps = np.where(keys == top, 0, steps)
    return np.where(keys == EXCLUDED, FAR, steps)


def weights(distance: np.ndarray, scale: Scale) -> np.ndarray:
    """Weights of tokens at those distances, ``uint64``."""
    exponent = distance.astype(np.uint64) * np.uint64(2 * scale.multiplier) >> np.uint64(32)
    fraction = (exponent << np.uint64(32 - EXPONENT_BITS)) & _MASK32  # in units of 2^-32
    polynomial = np.full_like(fraction, EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        polynomial = np.uint64(coefficient) - (polynomial * fraction >> np.uint64(32))
    mantissa = np.uint64(1 << 31) - (polynomial * fraction >> np.uint64(33))  # 2^-f in units of 2^-31
    whole = np.minimum(exponent >> np.uint64(EXPONENT_BITS), np.uint64(63))
    return mantissa << np.uint64(WEIGHT_BITS - 31) >> whole


def probability_word(p: float) -> int:
    """A probability in [0, 1) in units of 2^-32, as the device has it."""
    return min(max(round(p * 2.0**32), 0), 0xFFFFFFFF)


def mass_needed(p: int, total: int) -> int:
    """The smallest weight that is at least ``p * 2^-32`` of ``total``, and at least 1."""
    return max(1, -(-p * total >> 32))


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).

    ``counter``: uint32 ``[..., 4]``, ``key``: uint32 ``[..., 2]``; four random words for each, ``[..., 4]``.
    """
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    for _ in range(10):
        low, high = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (high >> np.uint64(32)) ^ c[1] ^ k[0],
            high & _MASK32,
            (low >> np.uint64(32)) ^ c[3] ^ k[1],
            low & _MASK32,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & _MASK32, (k[1] + np.uint64(0xBB67AE85)) & _MASK32]
    return np.stack(c, axis=-1).astype(np.uint32)


def random_word(seed: int, sequence: int, position: int) -> int:
    """The 64 random bits of one draw: a pure function of the seed, the sequence and the position."""
    counter = np.array([position, sequence, 0, 0], np.uint32)
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    words = philox4x32(counter, key)
    return int(words[0]) | int(words[1]) << 32


def threshold(random: int, total: int) -> int:
    """A number in [0, total): 64 random bits scaled down to the sum of the weights."""
    return random * total >> 64
