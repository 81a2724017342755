"""Sampling parameters: what is refused and how it is said, what they amount to, and where they come from."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest

from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.sampling.params import STAGES, SamplingParams

REFUSED = [
    ({"temperature": math.nan}, "temperature is nan: it must be a number, 0 or less (greedy), or between"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": 1e-7}, "temperature is 1e-07: it must be 0 or less (greedy), or between 1e-6 and 100"),
    ({"temperature": 101}, "temperature is 101"),
    ({"temperature": 10**400}, "temperature is "),
    ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
    ({"temperature": True}, "temperature is True: it must be a number"),
    ({"top_k": -1}, "top_k is -1: it must be 0 (off) or more"),
    ({"top_k": 2.0}, "top_k is 2: it must be a whole number"),
    ({"top_k": None}, "top_k is None"),
    ({"top_p": 0}, "top_p is 0: it must be more than 0"),
    ({"top_p": -0.5}, "top_p is -0.5"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"min_p": 1.5}, "min_p is 1.5: it must be between 0 (off) and 1"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"typical_p": 0.0}, "typical_p is 0"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be between 0.01 and 100"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1: it must be between -2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3: it must be between -2 and 2"),
    ({"penalty_window": -2}, "penalty_window is -2: it must be a number of tokens, or -1 for all"),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]: it must be a map"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias names -1"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias names 'a'"),
    ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan"),
    ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 is inf"),
    ({"logit_bias": {5: 1e31}}, "logit_bias of token 5 is 1e+31: it must be between -1e30 and 1e30, or -inf"),
    ({"seed": -1}, "seed is -1: it must be between 0 and 2^64 - 1"),
    ({"seed": 2**64}, "seed is 18446744073709551616"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"stop": [""]}, "stop has ''"),
    ({"stop": 7}, "stop is 7"),
    ({"stop": [7]}, "stop has 7"),
    ({"stop_token_ids": [2, -2]}, "stop_token_ids names -2"),
    ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'"),
    ({"ignore_eos": 1}, "ignore_eos is 1: it must be true or false"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0: it must be 1 or more"),
    ({"logprobs": 21}, "logprobs is 21: it must be between 0 and 20"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"bad_words": [" "]}, "bad_words has ' '"),
    ({"bad_words": [[]]}, "bad_words has ()"),
    ({"bad_words": [[1, "x"]]}, "bad_words names 'x'"),
    ({"sampler_order": "top_k"}, "sampler_order is 'top_k'"),
    (
        {"sampler_order": ["top_q"]},
        "sampler_order names 'top_q': it must be a list of these: penalties, bias",
    ),
    ({"sampler_order": ["bias", "bias"]}, "sampler_order names bias twice"),
    # contradictions
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9 and max_new_tokens 8"),
    ({"penalty_window": 0, "presence_penalty": 1}, "penalty_window is 0, so penalties would do nothing"),
    (
        {"temperature": 1, "top_k": 5, "sampler_order": ["top_p", "temperature"]},
        "sampler_order leaves out top_k, which is set",
    ),
    ({"temperature": 0.5, "sampler_order": ["top_k"]}, "sampler_order leaves out temperature"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields)[:60] for fields, _ in REFUSED])
def test_a_refused_value_is_named_with_its_range(fields, message):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.is_greedy
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
    assert params.active_stages == ()


def test_bounds_of_the_ranges_are_allowed():
    SamplingParams(temperature=1e-6, top_p=1e-300, min_p=1, typical_p=5, repetition_penalty=0.01)
    SamplingParams(temperature=100, top_p=1.5, min_p=0, repetition_penalty=100, seed=2**64 - 1)
    SamplingParams(temperature=-1, logit_bias={0: -math.inf, 2**31 - 1: 1e30}, logprobs=20)


def test_parameters_do_not_change():
    params = SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 5
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0
    with pytest.raises(TypeError):
        params.logit_bias.update({1: 3.0})
    assert params.stop == ("a",)


def test_equal_parameters_are_equal_and_hash_alike():
    a = SamplingParams(temperature=1, logit_bias={1: 2, 3: -math.inf}, stop="end")
    b = SamplingParams(temperature=1.0, logit_bias={3: -math.inf, 1: 2.0}, stop=["end"])
    assert a == b and hash(a) == hash(b)
    assert a != a.replace(top_k=1)


def test_parameters_travel_to_another_process_and_to_json():
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=["a", "b"])
    assert pickle.loads(pickle.dumps(params)) == params
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"1": 2.0}


def test_replace_and_from_dict_validate_again():
    assert SamplingParams().replace(top_k=3).top_k == 3
    with pytest.raises(UsageError, match="top_k is -3"):
        SamplingParams().replace(top_k=-3)
    with pytest.raises(UsageError, match="no sampling parameter 'topk'"):
        SamplingParams.from_dict({"topk": 3})


def test_active_stages_are_those_that_do_something_in_their_order():
    everything = SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.9,
        presence_penalty=1,
        logit_bias={1: 1.0},
    )
    assert everything.active_stages == STAGES
    assert SamplingParams(temperature=1, top_k=5, top_p=1).active_stages == ("top_k",)
    reverse = everything.replace(sampler_order=STAGES[::-1])
    assert reverse.active_stages == STAGES[::-1]
    assert everything.replace(temperature=0).active_stages == ("penalties", "bias")


def test_a_token_beyond_the_vocabulary_is_named():
    for fields in ({"logit_bias": {100: 1}}, {"stop_token_ids": [100]}, {"bad_words": [[1, 100]]}):
        params = SamplingParams(**fields)
        params.check_vocabulary(101)
        with pytest.raises(UsageError, match=f"{next(iter(fields))} names token 100: the vocabulary has 100"):
            params.check_vocabulary(100)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2}, {}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": True, "top_k": None, "min_p": None}, {"temperature": 1.0}),
    ],
)
def test_recommended_values_come_from_generation_config(config, expected):
    assert SamplingParams.from_generation_config(config) == SamplingParams(**expected)


def test_a_bad_recommended_value_names_the_file_and_the_key():
    with pytest.raises(ModelError, match=r"generation_config.json: top_p is 'high'"):
        SamplingParams.from_generation_config({"do_sample": True, "top_p": "high"})
    with pytest.raises(ModelError, match=r"m.gguf: do_sample is 'yes'"):
        SamplingParams.from_generation_config({"do_sample": "yes"}, "m.gguf")
