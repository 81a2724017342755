"""What lies where in the sampler's buffers. Mirrors shaders/include/sample.glsl (a test compares the two).

All in 32-bit words. A row of a batch has a record of ``ROW_WORDS`` words; the records of all rows stand
side by side, and the bias lists they point to follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer_vk.kernels.base import ceil_div
from xinfer_vk.kernels.sample_math import MAX_VOCABULARY

ROW_WORDS = 40
MAX_SEGMENTS = 3
ROW_SEED = 0
ROW_SEQUENCE = 2
ROW_HISTORY = 3
ROW_FLAGS = 4
ROW_WINDOW = 5
ROW_REPETITION = 6
ROW_REPETITION_INVERSE = 7
ROW_PRESENCE = 8
ROW_FREQUENCY = 9
ROW_INVERSE_TEMPERATURE = 10
ROW_BIAS_FIRST = 11
ROW_BIAS_COUNT = 12
ROW_TOP_K = 13
ROW_TYPICAL_P = 14
ROW_TOP_P = 15
ROW_MIN_P = 16
ROW_SCALES = 18
SCALE_WORDS = 3
ROW_ADJUST = 24
ROW_MODE = 27
ROW_STAGES = 30
ROW_LOGPROBS = 33
ROW_TARGET = 34

FLAG_APPEND = 1
SAMPLED = 0xFFFFFFFF

ADJUST_PRESENT = 1
ADJUST_TEMPERATURE = 2
ADJUST_PENALTIES = 4
ADJUST_BIAS = 8
ADJUST_BANS = 16

MODE_DRAW = 1
MODE_SUMS = 2
MODE_SUMS_SCALE = 4
MODE_SHORT = 8

STAGE_DRAW = 0
STAGE_TOP_K = 1
STAGE_TYPICAL = 2
STAGE_TOP_P = 3
STAGE_MIN_P = 4
STAGE_TEMPERATURE = 5

BIAS_WORDS = 3
CHUNK = 1024
LIST = 1024
LONG_LIST = 8192
KEPT_WORDS = 1 + 2 * LONG_LIST
KEPT_IN_KEYS = 0xFFFFFFFF
MAX_LOGPROBS = 20
LOGPROB_TOKEN = 0
LOGPROB_LOGIT = 1
LOGPROB_RANK = 2
LOGPROB_LARGEST = 3
LOGPROB_SUM = 4
LOGPROB_COUNT = 6
LOGPROB_TOP = 7
LOGPROB_WORDS = LOGPROB_TOP + 2 * MAX_LOGPROBS
NAN_TOKEN = 0xFFFFFFFF
NO_TOKEN = 0xFFFFFFFE

MAX_SUMS = 256  # chunks whose sums fit the bins of a selection


@dataclass(frozen=True)
class Geometry:
    """How a vocabulary is cut: into chunks of 1024 tokens, and these into groups of neighbours, at most
    1024 groups in all."""

    vocabulary: int

    def __post_init__(self) -> None:
        assert 1 <= self.vocabulary <= MAX_VOCABULARY, self.vocabulary

    @property
    def chunks(self) -> int:
        return ceil_div(self.vocabulary, CHUNK)

    @property
    def group_tokens(self) -> int:
        return max(64, 1 << (self.chunks - 1).bit_length())

    @property
    def groups(self) -> int:
        return self.chunks * CHUNK // self.group_tokens

    @property
    def done(self) -> int:
        """Where a row's partials say whether it is done, after the groups' largest keys and the chunks' sums.
        The sum of the sums follows, two words."""
        return self.groups + 2 * self.chunks

    @property
    def partials_stride(self) -> int:
        return self.done + 3

    def short_list_suits(self, k: int) -> bool:
        """Whether ``k`` candidates are few enough to be looked for by groups."""
        return self.vocabulary <= LIST or k <= self.groups // 2
