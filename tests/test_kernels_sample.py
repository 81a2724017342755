"""The device sampler: kernels against their oracles, and whole rows against the CPU reference, to the bit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from xinfer_vk.errors import NumericError, UsageError
from xinfer_vk.kernels import sample_layout as lay
from xinfer_vk.kernels import sample_math as arithmetic
from xinfer_vk.kernels import state as st
from xinfer_vk.kernels.argmax import argmax, argmax_partial_words
from xinfer_vk.kernels.base import Ref
from xinfer_vk.plan import BufferKind, Plan
from xinfer_vk.reference import NumpyRuntime
from xinfer_vk.sampling.device import NAN_TOKEN, NO_TOKEN, DeviceSampler, RowParams, check_tokens
from xinfer_vk.sampling.logprobs import logprobs_of
from xinfer_vk.sampling.params import SamplingParams
from xinfer_vk.sampling.reference import Sampled, sample
from xinfer_vk.selftest import sample as sample_cases

BUFFERS = (
    "logits",
    "state",
    "result",
    "sampler parameters",
    "sampler history",
    "sampler keys",
    "sampler partials",
    "sampler kept",
    "sampler logprobs",
)
EXACT = dict.fromkeys(BUFFERS, "u32")
IN_THE_MIDDLE = ("top_k", "penalties", "top_p", "bias", "typical", "min_p", "temperature")  # three segments

# What a chat would use, each stage alone, stages together, and orders of more than one segment.
CHAINS: dict[str, dict] = {
    "greedy": {},
    "draw": {"temperature": 1.0},
    "warm-draw": {"temperature": 1.7},
    "chat": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "large-top-k": {"temperature": 1.0, "top_k": 600},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "wide-top-p": {"temperature": 1.3, "top_p": 0.9999},
    "min-p": {"temperature": 1.0, "min_p": 0.02},
    "typical": {"temperature": 0.9, "typical_p": 0.7},
    "typical-then-min-p": {"temperature": 1.0, "typical_p": 0.3, "min_p": 0.4},
    "all": {"temperature": 0.9, "top_k": 200, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.01},
    "warm-first": {
        "temperature": 1.5, "top_p": 0.9, "min_p": 0.03, "sampler_order": ("temperature", "top_p", "min_p"),
    },
    "penalties": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "window": {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 1.5, "penalty_window": 5},
    "bias": {"temperature": 1.0, "top_k": 20, "logit_bias": {0: 4.0, 3: -np.inf, 5: -2.5}},
    "greedy-adjusted": {"repetition_penalty": 1.2, "presence_penalty": 0.7, "logit_bias": {1: 1.0}},
    "three-segments": {
        "temperature": 0.8, "top_k": 100, "repetition_penalty": 1.4, "top_p": 0.97, "logit_bias": {0: 3.0},
        "typical_p": 0.9, "sampler_order": IN_THE_MIDDLE,
    },
    "warm-then-adjusted": {
        "temperature": 1.4, "top_p": 0.9, "presence_penalty": 1.0, "top_k": 30,
        "sampler_order": ("top_p", "temperature", "penalties", "top_k"),
    },
}  # fmt: skip


def state_words(positions: Sequence[int]) -> np.ndarray:
    """A state in which row i's token stands at ``positions[i]``. Token rows are in reverse of output rows."""
    n = len(positions)
    words = np.zeros(st.state_words(1, 1), np.uint32)
    words[st.N_TOKENS] = words[st.N_OUTPUTS] = n
    words[st.OUTPUT_ROW : st.OUTPUT_ROW + n] = np.arange(n)[::-1]
    words[st.POSITION : st.POSITION + n] = np.asarray(positions)[::-1]
    return words


class Bench:
    """A sampler on a device, fed with rows of logits."""

    def __init__(self, runtime, vocabulary: int, rows: int, slots: int = 1, context: int = 64) -> None:
        self.runtime, self.vocabulary, self.rows = runtime, vocabulary, rows
        self.stride = vocabulary + 3
        self.sampler = DeviceSampler(runtime, vocabulary, rows, slots=slots, history_tokens=context)
        self.logits = runtime.allocate("logits", 5 + rows * self.stride, BufferKind.SCRATCH)
        self.result = runtime.allocate("result", 2 + rows, BufferKind.RESULT)
        self.state = runtime.allocate("state", st.state_words(1, 1), BufferKind.STATE)
        self.plans: dict = {}

    def steps(self, variant):
        return self.sampler.steps(
            Ref(self.logits, 5), self.stride, self.rows, Ref(self.result, 2), self.state, variant
        )

    def write(self, logits: np.ndarray, positions: Sequence[int]) -> None:
        padded = np.full((self.rows, self.stride), np.nan, np.float32)  # unused rows and columns are garbage
        padded[: logits.shape[0], : self.vocabulary] = logits
        self.runtime.write(self.logits, 5, padded.reshape(-1).view(np.uint32))
        self.runtime.write(self.state, 0, state_words(positions))

    def run(
        self, logits: np.ndarray, rows: Sequence[RowParams], positions: Sequence[int] | None = None
    ) -> np.ndarray:
        """Tokens of some rows of logits, ``int64 [n]``. ``positions``: of the tokens to be sampled."""
        positions = [1] * len(rows) if positions is None else positions
        self.write(logits, [p - 1 for p in positions])
        return self.replay(self.sampler.write_params(rows), len(rows))

    def replay(self, variant, n: int) -> np.ndarray:
        if variant not in self.plans:
            self.plans[variant] = self.runtime.prepare(Plan("sample", tuple(self.steps(variant))))
        self.plans[variant].run()
        return self.runtime.read(self.result, 2, n).astype(np.int64)

    def kept(self, n: int) -> list[list[int]]:
        """The tokens that each of the last run's rows was drawn from."""
        lists = self.runtime.read(self.sampler.buffers.kept, 0, n * lay.KEPT_WORDS).reshape(n, -1)
        keys = self.runtime.read(self.sampler.buffers.keys, 0, n * self.vocabulary).reshape(n, -1)
        out = []
        for row in range(n):
            if lists[row, 0] == lay.KEPT_IN_KEYS:
                out.append(np.flatnonzero(keys[row]).tolist())
            else:
                pairs = lists[row, 1 : 1 + 2 * int(lists[row, 0])].reshape(-1, 2)
                out.append(sorted(pairs[pairs[:, 0] != 0, 1].tolist()))
        return out

    def check(
        self, logits: np.ndarray, rows: Sequence[RowParams], positions: Sequence[int], histories=None
    ) -> None:
        """Every row's token and kept set are the CPU reference's."""
        tokens, kept = self.run(logits, rows, positions), self.kept(len(rows))
        for i, row in enumerate(rows):
            history = histories[i] if histories is not None else np.zeros(positions[i], np.int64)
            want = reference(logits[i], row, history, positions[i])
            what = f"row {i}, {row.params}"
            if isinstance(want, int):
                assert tokens[i] == want, what
                continue
            assert kept[i] == want.kept.tolist(), what
            assert tokens[i] == want.token, what

    def free(self) -> None:
        self.plans.clear()
        self.sampler.free()
        for buffer in (self.logits, self.result, self.state):
            self.runtime.free(buffer)


def reference(logits, row: RowParams, history, position: int) -> Sampled | int:
    """What the device says instead of a token where there is an error."""
    ends = row.end_tokens if position < row.end_from else ()
    try:
        return sample(
            logits, row.params, history, row.seed, row.sequence, position, banned=(*row.banned, *ends)
        )
    except NumericError as error:
        assert ("no token is possible" in str(error)) != ("hold NaN or +inf" in str(error))
        return NO_TOKEN if "possible" in str(error) else NAN_TOKEN


@pytest.fixture
def bench(runtime) -> Iterator:
    made: list[Bench] = []

    def make(*args, **kwargs) -> Bench:
        made.append(Bench(runtime, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.free()


def peaked(rng: np.random.Generator, rows: int, vocabulary: int) -> np.ndarray:
    """Logits as language models have them: a broad middle, a few tokens far above."""
    logits = rng.standard_normal((rows, vocabulary)) * rng.uniform(0.5, 4, (rows, 1))
    for row in logits:
        few = rng.integers(0, vocabulary, 8)
        row[few] += rng.uniform(2, 12, 8)
    return logits.astype(np.float32)


def within(fields: dict, vocabulary: int) -> dict:
    """The same without a bias for tokens that a small vocabulary does not have."""
    bias = {token: b for token, b in fields.get("logit_bias", {}).items() if token < vocabulary}
    return {**fields, "logit_bias": bias}


# -- the layout -------------------------------------------------------------------------------------


def test_the_layout_in_python_is_the_one_in_glsl():
    include = Path(__file__).parent.parent / "shaders" / "include"
    text = "".join((include / name).read_text(encoding="utf-8") for name in ("argmax.glsl", "sample.glsl"))
    values: dict[str, int] = {}
    for name, expression in re.findall(r"^const uint (\w+) = ([^;]+);", text, re.M):
        values[name] = eval(re.sub(r"\b(0x[0-9A-F]+|\d+)u\b", r"\1", expression), {}, dict(values))
    mirrored = {name for name in values if hasattr(lay, name)}
    assert {name: values[name] for name in mirrored} == {name: getattr(lay, name) for name in mirrored}
    assert values.keys() - mirrored <= {
        "SCALE_FACTOR", "SCALE_MULTIPLIER", "SCALE_LAST", "EXCLUDED", "MINUS_INFINITY_KEY", "NAN_KEY", "FAR",
    }  # fmt: skip
    assert (values["EXCLUDED"], values["FAR"]) == (arithmetic.EXCLUDED, arithmetic.FAR)
    assert values["MINUS_INFINITY_KEY"] == arithmetic.MINUS_INFINITY_KEY
    assert values["NAN_KEY"] == arithmetic.NAN_KEY
    for coefficient in arithmetic.EXP2_COEFFICIENTS:
        assert f"{coefficient}u" in text


@pytest.mark.parametrize("vocabulary", [1, 64, 1024, 1025, 49152, 128256, 151936, 262144, 1 << 19])
def test_a_vocabulary_is_cut_into_at_most_1024_groups(vocabulary):
    g = lay.Geometry(vocabulary)
    assert g.groups <= lay.LIST and g.groups * g.group_tokens >= vocabulary
    assert lay.CHUNK % g.group_tokens == 0 and g.chunks * (lay.CHUNK // g.group_tokens) == g.groups
    assert 32 % (lay.CHUNK // g.group_tokens) == 0  # so that invocations divide evenly among groups


# -- kernels against their oracles ------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 3, 63, 257, 1025, 3001])
def test_kernels_equal_their_oracles_word_for_word(check_steps, vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = peaked(rng, len(CHAINS), vocabulary)
    rows = [
        RowParams(
            SamplingParams(**within(fields, vocabulary)),
            seed=i,
            sequence=i,
            history=i,
            banned=(0,) if i % 5 == 4 and vocabulary > 1 else (),
        )
        for i, fields in enumerate(CHAINS.values())
    ]

    def build(rt):
        bench = Bench(rt, vocabulary, len(rows) + 2, slots=len(rows), context=20)
        bench.write(logits, np.arange(len(rows)))
        for row in range(len(rows)):
            bench.sampler.write_history(row, np.arange(row * 7, row * 7 + 20) % vocabulary)
        return bench.steps(bench.sampler.write_params(rows))

    # the order of a list is the device's choice, and what is left of the keys is looked at below
    check_steps(build, views=EXACT, ignore=("sampler kept", "sampler keys"))
    check_steps(lambda rt: [step for step in build(rt) if "pick" not in step.label], views=EXACT)


@pytest.mark.parametrize("case", sample_cases.CASES, ids=str)
def test_the_selftest_finds_nothing_wrong(runtime, case):
    if not case.applies(runtime.profile):
        pytest.skip("another case is the same on this device")
    assert case.run(runtime).problem == ""


# -- rows against the reference ---------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [2, 7, 257, 1030, 5000])
def test_kept_sets_and_tokens_of_random_rows_are_the_references(bench, vocabulary):
    rng = np.random.default_rng(vocabulary)
    count = {5000: 24}.get(vocabulary, 64)
    box = bench(vocabulary, count, slots=count, context=40)
    names = list(CHAINS)
    for _ in range(6):
        logits = peaked(rng, count, vocabulary)
        histories = [rng.integers(0, vocabulary, int(rng.integers(1, 40))) for _ in range(count)]
        rows = []
        for i in range(count):
            fields = dict(CHAINS[names[int(rng.integers(len(names)))]])
            fields["logit_bias"] = {
                t: b for t, b in fields.get("logit_bias", {}).items() if t < vocabulary - 1
            }
            rows.append(
                RowParams(SamplingParams(**fields), seed=int(rng.integers(1 << 62)), sequence=i, history=i)
            )
            box.sampler.write_history(i, histories[i])
        box.check(logits, rows, [h.size for h in histories], histories)


def test_a_real_vocabulary_is_sampled_as_the_reference_does(bench):
    rng = np.random.default_rng(0)
    names = [n for n in CHAINS if n not in ("penalties", "window", "greedy-adjusted", "three-segments")]
    box = bench(49152, len(names))
    logits = peaked(rng, len(names), 49152)
    rows = [
        RowParams(SamplingParams(**CHAINS[n]), seed=9, sequence=i, history=0 if "adjusted" in n else None)
        for i, n in enumerate(names)
    ]
    box.check(logits, rows, [1] * len(rows))


def adversarial(vocabulary: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    ids = np.arange(vocabulary)
    rows = {
        "all equal": np.zeros(vocabulary),
        "all equal and large": np.full(vocabulary, 3e38),
        "one spike": np.where(ids == vocabulary // 2, 50.0, 0.0),
        "spike at the end": np.where(ids == vocabulary - 1, 1e30, -1e30),
        "two values": np.where(ids % 2 == 0, 1.0, 0.5),
        "ties at the cut": np.where(ids % 7 == 0, 2.0, np.where(ids % 3 == 0, 1.0, 0.0)),
        "descending": -ids / 8.0,
        "ascending": ids / 8.0,
        "mostly -inf": np.where(ids % 50 == 3, rng.standard_normal(vocabulary), -np.inf),
        "one left": np.where(ids == 1, -5.0, -np.inf),
        "none left": np.full(vocabulary, -np.inf),
        "+inf": np.where(ids % 100 == 0, np.inf, 1.0),
        "huge": rng.standard_normal(vocabulary) * 1e37,
        "tiny": rng.standard_normal(vocabulary) * 1e-37,
        "denormal": rng.standard_normal(vocabulary) * 1e-42,
        "signs of zero": np.where(ids % 2 == 0, -0.0, 0.0),
        "next to each other": 5.0 + rng.integers(0, 4, vocabulary) * 2.0**-21,
        "far and wide": rng.choice([-1e30, -100.0, -30.0, -1.0, 0.0, 30.0, 100.0, 1e30], vocabulary),
        "on the edge of weightless": np.where(ids < 3, 0.0, -30.4 - ids / vocabulary / 4),
        "flat, far below": np.where(ids == 0, 0.0, -9.0),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


ADVERSARIAL_CHAINS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 2**31},
    {"temperature": 1.0, "top_k": 150},
    {"temperature": 1.0, "top_p": 1e-12},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 0.01, "top_p": 0.999999},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "min_p": 1e-30},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 100.0, "typical_p": 0.9, "sampler_order": ("temperature", "typical")},
    {"temperature": 1e-6, "top_k": 300, "top_p": 0.9},
    {"temperature": 1.0, "typical_p": 0.2, "min_p": 0.7},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.7},
    {"repetition_penalty": 1.5, "logit_bias": {5: 1e-35, 6: -1e-35}},
    {"temperature": 1.0, "repetition_penalty": 0.5, "top_k": 3},
]


@pytest.mark.parametrize("vocabulary", [100, 1500])
def test_adversarial_rows_are_sampled_as_the_reference_does(bench, vocabulary):
    cases = adversarial(vocabulary)
    box = bench(vocabulary, len(cases), context=8)
    logits = np.stack(list(cases.values()))
    history = np.array([0, 1, 2, 3, 3, 3])
    box.sampler.write_history(0, history)
    for i, fields in enumerate(ADVERSARIAL_CHAINS):
        rows = [RowParams(SamplingParams(**fields), seed=i, sequence=n, history=0) for n in range(len(cases))]
        # the history is shared: it is read before any row adds to it at position 6
        box.check(logits, rows, [6] * len(rows), [history] * len(rows))


def test_a_sum_that_falls_short_of_p_by_less_than_one_unit_takes_another_token(bench):
    # three tokens and a p for which p times the sum of the weights is just above the first one's weight
    rng = np.random.default_rng(12)
    scale = arithmetic.Scale.of(1.0)
    rows = -rng.uniform(0, 3, (100_000, 3)).astype(np.float32)
    rows[:, 0] = 0.0
    keys = arithmetic.keys_of(rows)
    sums = arithmetic.weights(arithmetic.distances(keys, int(keys[0, 0]), scale), scale).sum(axis=1)
    first = 1 << arithmetic.WEIGHT_BITS
    parts = [-(-(first << 32) // int(total)) for total in sums]
    short = (p * int(total) >> 32 == first and p * int(total) & 0xFFFFFFFF for p, total in zip(parts, sums))
    found = next(i for i, falls_short in enumerate(short) if falls_short)
    logits, part = rows[found], parts[found]
    params = SamplingParams(temperature=1.0, top_p=part / 2**32)
    assert len(sample(logits, params).kept) == 2
    bench(3, 1).check(logits[None], [RowParams(params)], [1])
    padded = np.full((1, 2000), -np.inf, np.float32)
    padded[0, [3, 700, 1900]] = logits
    bench(2000, 1).check(padded, [RowParams(params)], [1])


def test_greedy_however_it_is_asked_for_is_what_argmax_gives(bench, runtime):
    rng = np.random.default_rng(2)
    ways = [
        {}, {"temperature": -2.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-30},
        {"temperature": 1.0, "min_p": 1.0, "top_k": 1}, {"temperature": 1e-6},
    ]  # fmt: skip
    for vocabulary in (33, 2050):
        box = bench(vocabulary, len(ways))
        partials = runtime.allocate(
            "argmax", argmax_partial_words(runtime.profile, vocabulary, len(ways)), BufferKind.SCRATCH
        )
        largest = runtime.allocate("largest", len(ways), BufferKind.RESULT)
        steps = argmax(
            runtime.profile,
            Ref(box.logits, 5),
            box.stride,
            vocabulary,
            len(ways),
            Ref(largest),
            Ref(partials),
            box.state,
        )
        plan = runtime.prepare(Plan("argmax", tuple(steps)))
        for _ in range(5):
            logits = np.repeat(rng.standard_normal((1, vocabulary)).astype(np.float32), len(ways), axis=0)
            tokens = box.run(logits, [RowParams(SamplingParams(**way)) for way in ways])
            plan.run()
            assert (
                tokens.tolist()
                == runtime.read(largest, 0, len(ways)).tolist()
                == [logits[0].argmax()] * len(ways)
            )
        del plan
        runtime.free(partials)
        runtime.free(largest)


def test_draws_follow_the_distribution(bench, runtime):
    rows = 256
    # SwiftShader takes 0.3 ms a row; that its tokens are the same as elsewhere is tested above
    draws = 10_240 if "SwiftShader" in runtime.profile.name else 100_352
    box = bench(24, rows)
    exact = np.arange(1, 25) / 300
    params = SamplingParams(temperature=0.5, top_k=20)  # squares of the probabilities of the 20 largest
    exact = np.where(np.arange(24) >= 4, exact**2, 0)
    exact /= exact.sum()
    logits = np.repeat(np.log(np.arange(1, 25))[None], rows, axis=0).astype(np.float32)
    batch = [RowParams(params, seed=2024, sequence=i) for i in range(rows)]
    variant = box.sampler.write_params(batch)
    counts = np.zeros(24, np.int64)
    box.write(logits, [0] * rows)
    for position in range(draws // rows):
        box.runtime.write(box.state, st.POSITION, np.full(rows, position, np.uint32))
        counts += np.bincount(box.replay(variant, rows), minlength=24)
    assert counts.sum() == draws and (counts[:4] == 0).all()
    expected = draws * exact[4:]
    chi_square = ((counts[4:] - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 19 degrees of freedom: passed once in a thousand


# -- batches ----------------------------------------------------------------------------------------


def test_a_row_is_sampled_alike_alone_and_in_any_batch(bench):
    rng = np.random.default_rng(4)
    vocabulary = 1200
    logits = peaked(rng, 8, vocabulary)
    rows = [
        RowParams(SamplingParams(**CHAINS[name]), seed=3, sequence=i, history=i)
        for i, name in enumerate(
            ["chat", "draw", "top-p", "greedy", "penalties", "three-segments", "typical", "min-p"]
        )
    ]
    together = bench(vocabulary, 8, slots=8)
    alone = bench(vocabulary, 1, slots=8)
    for box in (together, alone):
        for i in range(8):
            box.sampler.write_history(i, np.arange(i, i + 9))
    tokens = together.run(logits, rows, [9] * 8)
    assert [int(alone.run(logits[i : i + 1], [rows[i]], [9])[0]) for i in range(8)] == tokens.tolist()
    order = [5, 2, 7, 0]
    assert together.run(logits[order], [rows[i] for i in order], [9] * 4).tolist() == tokens[order].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_or_infinity_in_a_row_is_told_and_spoils_no_other(bench, value):
    rng = np.random.default_rng(5)
    logits = peaked(rng, 6, 1500)
    box = bench(1500, 6)
    names = ["chat", "draw", "greedy", "top-p", "three-segments", "bias"]
    rows = [RowParams(SamplingParams(**CHAINS[n]), sequence=i, history=0) for i, n in enumerate(names)]
    clean = box.run(logits, rows)
    for bad in range(6):
        spoiled = logits.copy()
        spoiled[bad, 1499 if bad % 2 else 3] = value  # token 3 is banned in the last row, and an error
        tokens = box.run(spoiled, rows)
        assert tokens[bad] == NAN_TOKEN
        assert np.delete(tokens, bad).tolist() == np.delete(clean, bad).tolist()
    with pytest.raises(NumericError, match="step 12: the logits for position 7 hold NaN"):
        check_tokens(np.array([5, NAN_TOKEN]), [6, 7], 12)
    with pytest.raises(NumericError, match="step 12: no token is possible at position 6"):
        check_tokens(np.array([NO_TOKEN, NAN_TOKEN]), [6, 7], 12)
    check_tokens(np.array([5, 0]), [6, 7], 12)


# -- history, bans, parameters ----------------------------------------------------------------------


def generate(box: Bench, logits: np.ndarray, row: RowParams, prompt: np.ndarray, count: int) -> list[int]:
    """Tokens that are sampled one after the other from the same logits."""
    box.sampler.write_history(0, prompt)
    variant = box.sampler.write_params([row])
    out = []
    for i in range(count):
        box.write(logits, [prompt.size + i - 1])
        out.append(int(box.replay(variant, 1)[0]))
    return out


def test_sampled_tokens_count_in_later_penalties(bench):
    rng = np.random.default_rng(6)
    logits = peaked(rng, 1, 300)
    prompt = rng.integers(0, 300, 10)
    for params in (
        SamplingParams(temperature=0.6, top_k=10, frequency_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(presence_penalty=2.0, penalty_window=3),
    ):
        box = bench(300, 1)
        row = RowParams(params, seed=8, history=0)
        want: list[int] = []
        for _ in range(30):
            history = np.array([*prompt, *want])
            want.append(sample(logits[0], params, history, 8).token)
        assert generate(box, logits, row, prompt, 30) == want


def test_a_history_that_is_full_is_no_harm(bench):
    box = bench(50, 1, slots=2, context=12)
    logits = np.zeros((1, 50), np.float32)
    box.sampler.write_history(1, np.full(12, 7))
    generate(
        box,
        logits,
        RowParams(SamplingParams(temperature=1, presence_penalty=1.0), history=0),
        np.arange(10),
        6,
    )
    assert (box.runtime.read(box.sampler.buffers.history, 12, 12) == 7).all()
    box.sampler.write_history(0, np.arange(100))  # what does not fit is left out
    assert (box.runtime.read(box.sampler.buffers.history, 12, 12) == 7).all()


def test_ends_are_banned_until_enough_tokens_have_come(bench):
    box = bench(40, 1)
    logits = np.zeros((1, 40), np.float32)
    logits[0, [5, 6]] = 9, 8  # end tokens
    row = RowParams(SamplingParams(logit_bias={7: 1.0}), end_tokens=(5, 6), end_from=13)
    assert generate(box, logits, row, np.arange(10), 5) == [7, 7, 7, 5, 5]


def test_banned_tokens_do_not_come(bench):
    box = bench(2000, 4)
    logits = np.tile(np.linspace(0, 8, 2000).astype(np.float32), (4, 1))
    banned = tuple(range(1500, 2000))
    late = SamplingParams(
        temperature=1, top_k=3, logit_bias={1600: 50.0}, sampler_order=("top_k", "bias", "temperature")
    )
    rows = [RowParams(p, banned=banned, sequence=i) for i, p in enumerate(
        (SamplingParams(), SamplingParams(temperature=1, top_k=2), SamplingParams(temperature=1), late)
    )]  # fmt: skip
    box.check(logits, rows, [1] * 4)
    assert box.kept(4)[1] == [1498, 1499] and box.kept(4)[3] == [1497, 1498, 1499]
    assert box.run(logits, [RowParams(SamplingParams(), banned=tuple(range(2000)))]).tolist() == [NO_TOKEN]
    beyond = RowParams(SamplingParams(), banned=(2000, 5000), end_tokens=(2001,), end_from=9)
    box.check(logits[:1], [beyond], [1])


def test_parameters_are_written_once_and_checked(bench):
    box = bench(100, 2)
    writes: list[str] = []
    real = box.runtime.write
    rows = [RowParams(SamplingParams(temperature=1, top_k=3)), RowParams(SamplingParams())]
    box.sampler.write_params(rows)
    try:
        box.runtime.write = lambda buffer, offset, words: (
            writes.append(buffer.name),
            real(buffer, offset, words),
        )
        assert box.sampler.write_params(list(rows)) == box.sampler.write_params(rows)
        assert not writes
        box.sampler.write_params(rows[:1])
        assert writes == ["sampler parameters"]
    finally:
        box.runtime.write = real
    with pytest.raises(UsageError, match="logit_bias names token 100: the vocabulary has 100, 0 to 99"):
        box.sampler.write_params([RowParams(SamplingParams(logit_bias={100: 1.0}))])


def test_more_biased_tokens_than_there_is_room_for_are_refused(runtime):
    sampler = DeviceSampler(runtime, 5000, 2, bias_entries=100)
    row = RowParams(SamplingParams(logit_bias=dict.fromkeys(range(60), 1.0)))
    sampler.write_params([row])
    with pytest.raises(UsageError, match="120 biased or banned tokens in one batch: there is room for 100"):
        sampler.write_params([row, row])
    sampler.free()


# -- log-probabilities ------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [3, 255, 257, 3001])
def test_log_probabilities_equal_the_references_bit_for_bit(bench, vocabulary):
    rng = np.random.default_rng(vocabulary)
    logits = peaked(rng, 6, vocabulary)
    logits[1] = 0.0
    logits[2, ::2] = -np.inf
    logits[3, :2] = 3e38
    box = bench(vocabulary, 6)
    wanted = [0, 1, 5, 20, 20, None]
    rows = [
        RowParams(
            SamplingParams(temperature=0.7, top_k=9, logprobs=n), sequence=i, target=1 if i == 4 else None
        )
        for i, n in enumerate(wanted)
    ]
    tokens = box.run(logits, rows)
    for i, n in enumerate(wanted):
        got = box.sampler.read_logprobs(i)
        if n is None:
            assert got is None and box.sampler.logprobs_bytes(i) == 0
            continue
        assert got == logprobs_of(logits[i], 1 if i == 4 else int(tokens[i]), n)
        assert box.sampler.logprobs_bytes(i) == 28 + 8 * n


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_log_probabilities_of_nan_and_infinity_are_an_error(bench, value):
    box = bench(40, 2)
    logits = np.zeros((2, 40), np.float32)
    logits[1, 7] = value
    box.run(logits, [RowParams(SamplingParams(logprobs=2))] * 2)
    assert box.sampler.read_logprobs(0) is not None
    with pytest.raises(NumericError, match="hold NaN"):
        box.sampler.read_logprobs(1)


def test_logprobs_kernel_equals_its_oracle(check_steps):
    rng = np.random.default_rng(8)
    logits = peaked(rng, 5, 700)
    logits[1] = 1.0
    logits[2] = -np.inf
    logits[3, 5] = np.nan
    rows = [RowParams(SamplingParams(logprobs=n), target=i) for i, n in enumerate((3, 20, 4, 2, 0))]

    def build(rt):
        box = Bench(rt, 700, 6)
        box.write(logits, [0] * 5)
        rt.write(box.result, 0, np.zeros(8, np.uint32))
        box.sampler.write_params(rows)
        return box.sampler.logprobs_step(Ref(box.logits, 5), box.stride, 6, Ref(box.result, 2), box.state)

    check_steps(build, views=EXACT)


# -- devices that keep their memory to themselves ---------------------------------------------------


def test_the_numpy_runtime_samples_too():
    rng = np.random.default_rng(9)
    logits = peaked(rng, 5, 1100)
    box = Bench(NumpyRuntime(), 1100, 5)
    rows = [RowParams(SamplingParams(**CHAINS[n]), seed=1, sequence=i, history=0)
            for i, n in enumerate(["chat", "draw", "top-p", "greedy", "three-segments"])]  # fmt: skip
    tokens = box.run(logits, rows)
    assert tokens.tolist() == [reference(logits[i], row, [0], 1).token for i, row in enumerate(rows)]


def test_the_history_lives_on_a_device_whose_memory_the_host_cannot_reach(device):
    from xinfer_vk.vulkan.runtime import KomputeRuntime

    logits = peaked(np.random.default_rng(10), 1, 300)
    params = SamplingParams(temperature=0.7, top_k=12, frequency_penalty=1.0)
    prompt, want = np.arange(5), []
    for _ in range(6):
        want.append(sample(logits[0], params, np.array([*prompt, *want]), 3).token)
    with KomputeRuntime(device.index, memory="discrete") as discrete:
        box = Bench(discrete, 300, 1)
        assert generate(box, logits, RowParams(params, seed=3, history=0), prompt, 6) == want
