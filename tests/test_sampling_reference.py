"""The CPU sampler: its arithmetic against exact softmax, its stages against a float64 textbook, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from xinfer_vk.errors import NumericError, UsageError
from xinfer_vk.kernels import sample_math as arithmetic
from xinfer_vk.kernels import sample_stages as stages
from xinfer_vk.kernels.sample_math import FAR, Scale
from xinfer_vk.sampling.logprobs import logprobs_of
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.program import segments_of
from xinfer_vk.sampling.reference import sample
from xinfer_vk.sampling.rules import BannedWords, bad_word_ids

INF = np.float32(np.inf)


def kept(logits, **fields) -> list[int]:
    history = fields.pop("history", ())
    return sample(np.array(logits, np.float32), SamplingParams(**fields), history).kept.tolist()


# -- the random numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known answers of the authors' Random123 distribution
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = arithmetic.philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert words.tolist() == expected


def test_random_numbers_depend_on_seed_sequence_and_position():
    words = {
        arithmetic.random_word(seed, sequence, position)
        for seed in (0, 1, 1 << 32, 2**64 - 1)
        for sequence in range(4)
        for position in range(16)
    }
    assert len(words) == 4 * 4 * 16


# -- weights against exact softmax ------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 0.3, 0.8, 1.0, 1.7, 10.0, 100.0])
def test_weights_are_exponentials(temperature):
    scale = Scale.of(temperature)
    below = np.concatenate([np.linspace(0, 31 * temperature, 100_001), [40 * temperature, 1e30]])
    logits = -below.astype(np.float32)
    got = arithmetic.weights(
        arithmetic.distances(arithmetic.keys_of(logits), int(arithmetic.keys_of(logits)[0]), scale), scale
    )
    exact = np.exp(logits.astype(np.float64) / temperature)
    error = np.abs(got / 2.0**44 - exact)
    # distances keep 31 bits of 31 temperatures: 2^-26; exponents 25 bits: 2^-25; polynomial 2^-28
    assert (error <= 2.0**-24 * exact + 2.0**-44).all()
    assert got[0] == 1 << 44 and got[-1] == 0


def test_weights_never_rise_with_distance():
    scale = Scale.of(1.0)
    ends = np.array([0, 1 << 20, scale.last - (1 << 16), scale.last])
    for end in ends:
        distance = np.arange(max(0, end - 60_000), end + 60_000)
        assert (np.diff(arithmetic.weights(distance, scale).astype(np.int64)) <= 0).all()


@pytest.mark.parametrize("temperature", [1e-6, 0.8, 1.0, 100.0])
def test_the_last_distance_with_a_weight_is_the_last(temperature):
    scale = Scale.of(temperature)
    assert scale.multiplier < 1 << 32 and scale.last < FAR
    assert [int(w) for w in arithmetic.weights(np.array([scale.last, scale.last + 1, FAR]), scale)] == [
        1,
        0,
        0,
    ]


def test_keys_order_as_logits_do():
    values = np.array([-np.inf, -3e38, -1.5, -1e-40, -0.0, 0.0, 1e-45, 1e-40, 2.0, 3e38], np.float32)
    keys = arithmetic.keys_of(values).astype(np.int64)
    assert keys[0] == 0 and keys[4] == keys[5]
    assert (np.diff(keys[[0, 1, 2, 3, 4, 6, 7, 8, 9]]) > 0).all()
    back = arithmetic.logits_of(keys.astype(np.uint32))
    assert np.array_equal(back, values)
    assert arithmetic.keys_of(np.array([np.nan, np.inf], np.float32)).tolist() == [arithmetic.NAN_KEY] * 2


# -- truncations against a textbook in float64 ------------------------------------------------------


def textbook(logits: np.ndarray, params: SamplingParams) -> tuple[set[int], set[int]]:
    """What must be kept and what may be, with probabilities from exact exponentials.

    They differ where a sum of probabilities comes within 1e-5 of the cut: the sampler's are that exact.
    """
    x = logits.astype(np.float64)
    order = np.lexsort((np.arange(x.size), -x))
    must = may = order
    temperature = 1.0
    for stage in params.active_stages:
        if stage == "temperature":
            temperature = params.temperature
            continue
        cuts = []
        for tokens, slack in ((must, -1e-5), (may, 1e-5)):
            p = np.exp((x[tokens] - x[may].max()) / temperature)
            p /= np.exp((x[may] - x[may].max()) / temperature).sum()
            if stage == "top_k":
                cuts.append(tokens[: params.top_k])
            elif stage == "top_p":
                before = np.cumsum(p) - p
                cuts.append(tokens[(before < params.top_p + slack) | (np.arange(p.size) == 0)])
            elif stage == "min_p":
                cuts.append(tokens[p >= params.min_p * p.max() * (1 - slack)])
            else:
                q = np.exp((x[may] - x[may].max()) / temperature)
                q /= q.sum()
                entropy = -(q * np.log(q)).sum()
                surprise = np.abs(-np.log(p) - entropy)
                ranked = np.argsort(surprise, kind="stable")
                before = np.cumsum(p[ranked]) - p[ranked]
                edge = surprise[ranked][np.flatnonzero(before < params.typical_p)[-1]]
                chosen = tokens[surprise < edge + 1e-4 * np.sign(slack)]
                cuts.append(chosen[np.argsort(-x[chosen], kind="stable")])
        must, may = cuts
    return set(must.tolist()), set(may.tolist())


CHAINS = [
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"typical_p": 0.6},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.1},
    {"top_k": 50, "typical_p": 0.8},
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_kept_sets_are_the_textbooks(chain, temperature):
    rng = np.random.default_rng(7)
    orders = [None, ("temperature", "penalties", "bias", "top_k", "typical", "top_p", "min_p")]
    for trial in range(40):
        logits = (rng.standard_normal(300) * rng.uniform(0.5, 6)).astype(np.float32)
        fields = {"temperature": temperature, **chain}
        if orders[trial % 2]:
            fields["sampler_order"] = orders[trial % 2]
        params = SamplingParams(**fields)
        must, may = textbook(logits, params)
        got = set(sample(logits, params).kept.tolist())
        assert must <= got <= may, (trial, sorted(must - got), sorted(got - may))


def test_probabilities_are_those_of_what_is_kept_at_the_temperature():
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    out = sample(logits, SamplingParams(temperature=0.5, top_k=3))
    exact = np.exp(np.array([4.0, 2.0, 0.0]))
    assert out.kept.tolist() == [0, 1, 2]
    assert np.allclose(out.probabilities, exact / exact.sum(), rtol=1e-6)


# -- by hand ----------------------------------------------------------------------------------------

LOG = np.log(np.array([0.4, 0.3, 0.2, 0.1]))  # four tokens with these probabilities


def test_top_p_keeps_the_smallest_prefix_that_reaches_p():
    assert kept(LOG, temperature=1, top_p=0.39) == [0]
    assert kept(LOG, temperature=1, top_p=0.41) == [0, 1]
    assert kept(LOG, temperature=1, top_p=0.69) == [0, 1]
    assert kept(LOG, temperature=1, top_p=0.71) == [0, 1, 2]
    assert kept(LOG, temperature=1, top_p=0.999) == [0, 1, 2, 3]
    assert kept(LOG, temperature=1, top_p=1e-300) == [0]


def test_min_p_keeps_what_is_likely_enough_next_to_the_first():
    assert kept(LOG, temperature=1, min_p=1.0) == [0]
    assert kept(LOG, temperature=1, min_p=0.76) == [0]
    assert kept(LOG, temperature=1, min_p=0.74) == [0, 1]
    assert kept(LOG, temperature=1, min_p=0.24) == [0, 1, 2, 3]


def test_typical_keeps_the_usual_and_may_leave_out_the_most_likely():
    # entropy 1.2799; surprises 0.916, 1.204, 1.609, 2.303: nearest are token 1, then 2, then 0
    assert kept(LOG, temperature=1, typical_p=0.29) == [1]
    assert kept(LOG, temperature=1, typical_p=0.49) == [1, 2]
    assert kept(LOG, temperature=1, typical_p=0.89) == [0, 1, 2]


def test_ties_are_cut_by_token_id():
    assert kept([1, 2, 2, 2, 1], temperature=1, top_k=2) == [1, 2]
    assert kept([0] * 10, temperature=1, top_k=3) == [0, 1, 2]
    assert kept([0] * 10, temperature=1, top_p=0.35) == [0, 1, 2, 3]
    assert kept([0] * 10, temperature=1, typical_p=0.15) == [0, 1]
    assert kept([0.0, -0.0, 0.0], temperature=1, top_k=2) == [0, 1]


def test_each_truncation_sees_what_the_one_before_it_left():
    # top-k 3 leaves 4/9, 3/9, 2/9: 0.44 of it is one token, where of the whole it would be two
    assert kept(LOG, temperature=1, top_k=3, top_p=0.44) == [0]
    assert kept(LOG, temperature=1, top_p=0.44) == [0, 1]
    assert kept(LOG, temperature=1, top_p=0.69, min_p=0.9) == [0]


def test_the_order_of_stages_changes_what_is_kept():
    # at temperature 2 the probabilities are 0.33, 0.28, 0.23, 0.16
    first = ("temperature", "penalties", "bias", "top_k", "typical", "top_p", "min_p")
    assert kept(LOG, temperature=2, top_p=0.69) == [0, 1]
    assert kept(LOG, temperature=2, top_p=0.69, sampler_order=first) == [0, 1, 2]
    # a bias before top-k brings a token in, after it none that is out comes back
    late = ("penalties", "top_k", "bias", "typical", "top_p", "min_p", "temperature")
    assert kept(LOG, temperature=1, top_k=2, logit_bias={3: 5.0}) == [0, 3]
    assert kept(LOG, temperature=1, top_k=2, logit_bias={3: 5.0}, sampler_order=late) == [0, 1]


def test_penalties_equal_a_hand_worked_example():
    logits = np.array([4.0, -2.0, 1.0, 0.5], np.float32)
    penalties = SamplingParams(
        temperature=1, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    from xinfer_vk.sampling.reference import adjust

    out = adjust("penalties", logits, penalties, np.array([0, 1, 0, 0]))
    # token 0, three times: 4 / 2 - 0.25 - 3 * 0.5; token 1, once: -2 * 2 - 0.25 - 0.5
    assert out.tolist() == [0.25, -4.75, 1.0, 0.5]


def test_penalties_look_back_over_their_window():
    logits = [3.0, 2.0, 1.0]
    history = [0, 1, 2, 2]
    greedy = {"presence_penalty": 1.5, "history": history}
    assert kept(logits, **greedy) == [0]  # 1.5, 0.5, -0.5
    assert kept(logits, penalty_window=3, **greedy) == [0]
    assert kept(logits, penalty_window=1, **greedy) == [0]
    assert kept(logits, penalty_window=4, repetition_penalty=100, presence_penalty=2, history=[0, 1]) == [2]
    assert kept(logits, penalty_window=1, repetition_penalty=100, presence_penalty=2, history=[0, 1]) == [0]


def test_bias_adds_and_minus_infinity_bans():
    assert kept([1.0, 2.0, 3.0], logit_bias={0: 2.5}) == [0]
    assert kept([1.0, 2.0, 3.0], logit_bias={2: -math.inf}) == [1]
    assert kept([1.0, 2.0, 3e38], logit_bias={2: -math.inf}) == [1]
    out = sample(np.array([1, 2, 3], np.float32), SamplingParams(temperature=1), banned=(1,))
    assert out.kept.tolist() == [0, 2]


def test_greedy_is_argmax_whichever_way_it_is_asked_for():
    rng = np.random.default_rng(3)
    ways = [
        {},
        {"temperature": -1},
        {"temperature": 1e-6},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 1, "min_p": 1.0},
    ]
    for _ in range(50):
        logits = rng.standard_normal(500).astype(np.float32)
        for way in ways:
            assert sample(logits, SamplingParams(**way)).token == logits.argmax()


def test_nan_is_an_error_and_no_token():
    with pytest.raises(NumericError, match="position 2 hold NaN"):
        sample(np.array([1, np.nan], np.float32), SamplingParams(), [0, 0])


def test_nothing_to_choose_from_is_an_error():
    for params in (SamplingParams(), SamplingParams(temperature=1, top_p=0.5)):
        with pytest.raises(NumericError, match="no token is possible at position 0"):
            sample(np.full(5, -np.inf, np.float32), params)
    with pytest.raises(NumericError, match="no token is possible"):
        sample(np.zeros(2, np.float32), SamplingParams(), banned=(0, 1))


@pytest.mark.parametrize("params", [{}, {"temperature": 1}, {"logit_bias": {0: -math.inf}}, {"top_k": 1}])
def test_an_infinite_logit_is_an_error_as_nan_is(params: dict[str, Any]):
    with pytest.raises(NumericError, match=r"position 2 hold NaN or \+inf"):
        sample(np.array([INF, 1, 2], np.float32), SamplingParams(**params), [0, 0])
    with pytest.raises(NumericError, match=r"hold NaN or \+inf"):
        logprobs_of(np.array([INF, 1, 2], np.float32), 1, 2)


def test_a_penalty_that_overflows_is_an_error():
    params = SamplingParams(repetition_penalty=0.01)
    with pytest.raises(NumericError, match=r"hold NaN or \+inf"):
        sample(np.array([3e38, 1, 2], np.float32), params, [0])


# -- draws ------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_token_and_another_one_another():
    logits = np.zeros(1000, np.float32)
    params = SamplingParams(temperature=1)
    draws = [sample(logits, params, seed=5, position=p).token for p in range(20)]
    assert draws == [sample(logits, params, seed=5, position=p).token for p in range(20)]
    assert draws != [sample(logits, params, seed=6, position=p).token for p in range(20)]
    assert draws != [sample(logits, params, seed=5, sequence=1, position=p).token for p in range(20)]


def test_the_ends_of_the_random_range_give_the_first_and_the_last_token():
    keys = arithmetic.keys_of(np.array([-np.inf, 1, 2, 3, -np.inf], np.float32))
    assert stages.draw(keys, Scale.of(1.0), 0) == 1
    assert stages.draw(keys, Scale.of(1.0), 2**64 - 1) == 3


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution():
    logits = np.log(np.arange(1, 21)).astype(np.float32)
    keys, scale = arithmetic.keys_of(logits), Scale.of(1.0)
    words = arithmetic.philox4x32(
        np.stack([np.arange(100_000, dtype=np.uint32)] + [np.zeros(100_000, np.uint32)] * 3, axis=-1),
        np.array([11, 0], np.uint32),
    )
    so_far = np.cumsum(stages.row_weights(keys, np.arange(20), scale))
    total = int(so_far[-1])
    targets = [(int(a) | int(b) << 32) * total >> 64 for a, b in words[:, :2]]
    tokens = np.searchsorted(so_far, np.array(targets, np.uint64), side="right")
    assert tokens[:50].tolist() == [
        sample(logits, SamplingParams(temperature=1), seed=11, position=p).token for p in range(50)
    ]
    counts = np.bincount(tokens, minlength=20)
    exact = np.arange(1, 21) / 210
    assert chi_square(counts, exact) < 43.8  # 19 degrees of freedom: 43.82 is passed once in a thousand


# -- log-probabilities ------------------------------------------------------------------------------


def test_logprobs_are_the_log_softmax_of_the_models_logits():
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(2000) * 3).astype(np.float32)
    exact = logits - logits.max() - np.log(np.exp(logits.astype(np.float64) - logits.max()).sum())
    params = SamplingParams(temperature=0.7, top_k=5, logit_bias={7: 3.0}, logprobs=4)
    out = sample(logits, params)
    assert out.logprobs is not None
    assert out.logprobs.token == out.token
    assert abs(out.logprobs.logprob - exact[out.token]) < 1e-5
    order = np.argsort(-logits, kind="stable")
    assert [token for token, _ in out.logprobs.top] == order[:4].tolist()
    assert np.allclose([p for _, p in out.logprobs.top], exact[order[:4]], atol=1e-5)
    assert out.logprobs.rank == int(np.flatnonzero(order == out.token)[0]) + 1


def test_logprobs_of_what_cannot_be_are_minus_infinity():
    logits = np.array([0, -np.inf, 0], np.float32)
    out = logprobs_of(logits, 1, 5)
    assert out.logprob == -math.inf and out.rank == 3
    assert out.top == ((0, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))))
    assert logprobs_of(np.array([3e38, 0], np.float32), 0, 1).logprob == 0.0


# -- rules and segments -----------------------------------------------------------------------------


def test_banned_words_ban_the_token_that_would_complete_them():
    banned = BannedWords([[5], [1, 2, 3], [2, 4], [7, 7]])
    assert not banned.always
    assert banned.after([]) == (5,)
    assert banned.after([1, 2]) == (3, 4, 5)
    assert banned.after([2]) == (4, 5)
    assert banned.after([9, 1, 2]) == (3, 4, 5)
    assert banned.after([1, 9, 2]) == (4, 5)
    assert banned.after([7, 7]) == (5, 7)
    assert BannedWords([[5], [3]]).always
    assert BannedWords([[5], [3]]).after([1, 2, 3]) == (3, 5)
    assert BannedWords([]).after([1]) == ()


def test_bad_words_are_banned_with_and_without_a_space_before():
    params = SamplingParams(bad_words=["ab", " c", [9, 8]])
    ids = bad_word_ids(params, lambda text: [ord(c) for c in text])
    assert ids == ((97, 98), (32, 97, 98), (32, 99), (9, 8))
    with pytest.raises(UsageError, match="'ab', which the tokenizer turns into no tokens"):
        bad_word_ids(params, lambda text: [])


def test_usual_orders_are_one_segment_and_odd_ones_more():
    def cut(*names):
        return [(s.adjust, s.stages) for s in segments_of(names)]

    assert len(cut("penalties", "bias", "top_k", "typical", "top_p", "min_p", "temperature")) == 1
    assert cut("temperature", "penalties", "bias", "top_k") == [(1 | 2 | 4 | 8, ["top_k"])]
    assert cut("top_k", "bias") == [(1, ["top_k"]), (1 | 8, [])]
    assert cut("bias", "penalties") == [(1 | 8, []), (1 | 4, [])]
    assert cut("top_k", "temperature", "bias", "top_p", "penalties") == [
        (1, ["top_k", "temperature"]),
        (1 | 2 | 8, ["top_p"]),
        (1 | 4, []),
    ]
