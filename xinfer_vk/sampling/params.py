"""What a user can ask of the sampler, validated once, when it is said."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeGuard

import numpy as np

from xinfer_vk.errors import ModelError, UsageError, parameter_words, said, setting
from xinfer_vk.fields import quoted
from xinfer_vk.options import shown_fields

# From prompt and answer so far and the logits after them, float32 [vocabulary], to logits of the same shape.
LogitsProcessor = Callable[[Sequence[int], np.ndarray], np.ndarray]

ADJUSTMENTS = ("penalties", "bias")
STAGES = ("penalties", "bias", "top_k", "typical", "top_p", "min_p", "temperature")
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
MAX_BIAS = 1e30
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
DEFAULT_MAX_NEW_TOKENS = 256

# field of SamplingParams → key of generation_config.json, and the value that turns it off
RECOMMENDED = {
    "temperature": ("temperature", 1.0),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "typical_p": ("typical_p", 1.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
}


# field of SamplingParams → its option on the command line, where that has another name
OPTIONS = {"stop_token_ids": "stop_token_id", "bad_words": "bad_word"}


class FrozenMap(dict):  # type: ignore[type-arg]
    """A dict that stays as it is, so that frozen parameters are frozen, and can be hashed."""

    def _refuse(self, *_: object, **__: object) -> None:
        raise TypeError("sampling parameters do not change: use replace()")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return FrozenMap, (dict(self),)


@dataclass(frozen=True, repr=False)
class SamplingParams:
    """How to choose tokens and when to stop. The default is greedy decoding.

    Raises :class:`UsageError`, which names the field, its value and its range. :meth:`check_vocabulary`
    checks token ids against a model.

    Choosing (docs/sampling.md explains each stage and their order):

    * ``temperature``: 0 or less is greedy, otherwise 1e-6 to 100.
    * ``top_k``: keep the ``k`` most likely tokens; 0 is off.
    * ``top_p``: keep the most likely tokens up to this probability mass; 1 or more is off.
    * ``min_p``: keep tokens with at least this fraction of the largest probability; 0 is off.
    * ``typical_p``: locally typical sampling: keep tokens up to this probability mass; 1 or more is off.
    * ``repetition_penalty``: 1 is off. ``presence_penalty``, ``frequency_penalty``: 0 is off. They cover the
      last ``penalty_window`` tokens of prompt and answer; -1 covers all.
    * ``logit_bias``: token id to a number that is added to its logit; ``-inf`` bans the token.
    * ``seed``: the same seed gives the same tokens; None takes a new seed for each call.
    * ``sampler_order``: the stages in order. A stage that is not in the list must be off.

    Bounds: ``stop`` strings, ``stop_token_ids``, ``ignore_eos``, ``min_new_tokens`` (no end earlier),
    ``max_new_tokens`` (also called ``max_tokens``), ``bad_words`` (strings, or token ids in a row, that must
    not appear).

    Reports: ``logprobs``: log-probabilities of the chosen token and of this many most likely ones; None
    is off.

    ``logits_processors``: functions of your own, ``(token_ids, logits) -> logits``, called for each token
    before everything else with prompt and answer so far and the row of logits, ``float32 [vocabulary]``. They
    cost speed: the rows of every sequence of the batch come back to the host, 4 bytes for each entry of the
    vocabulary, and the NumPy reference chooses the tokens there.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    logprobs: int | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    sampler_order: Sequence[str] = STAGES
    logits_processors: LogitsProcessor | Sequence[LogitsProcessor] = ()
    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            if self.max_new_tokens not in (DEFAULT_MAX_NEW_TOKENS, max_tokens):
                raise _two_limits(self.max_new_tokens, max_tokens)
            self._set("max_new_tokens", max_tokens)
        temperature = self._number("temperature", "0 or less (greedy), or between 1e-6 and 100")
        if temperature > 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise _refused("temperature", temperature, "0 or less (greedy), or between 1e-6 and 100")
        self._integer("top_k", 0, None, "0 (off) or more")
        self._number("top_p", "more than 0; 1 or more is off", above=0)
        self._number("min_p", "between 0 (off) and 1", 0, 1)
        self._number("typical_p", "more than 0; 1 or more is off", above=0)
        self._number("repetition_penalty", "between 0.01 and 100; 1 is off", 0.01, 100)
        self._number("presence_penalty", "between -2 and 2; 0 is off", -2, 2)
        self._number("frequency_penalty", "between -2 and 2; 0 is off", -2, 2)
        self._integer("penalty_window", -1, None, "a number of tokens, or -1 for all")
        if self.seed is not None:
            self._integer("seed", 0, MAX_SEED, "between 0 and 2^64 - 1")
        self._boolean("ignore_eos")
        self._integer("min_new_tokens", 0, None, "0 or more")
        self._integer("max_new_tokens", 1, None, "1 or more")
        if self.logprobs is not None:
            allowed = f"between 0 and {MAX_LOGPROBS}" + said(", or None (off)", "")
            self._integer("logprobs", 0, MAX_LOGPROBS, allowed)
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_words", _checked_bad_words(self.bad_words))
        self._set("sampler_order", self._checked_order())
        self._set("logits_processors", _checked_processors(self.logits_processors))
        self._refuse_contradictions()

    # -- what it amounts to -----------------------------------------------------------------------

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit wins, after penalties and bias."""
        return self.temperature <= 0

    @property
    def has_penalties(self) -> bool:
        """Whether the history changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def active_stages(self) -> tuple[str, ...]:
        """The stages that do something, in order. Greedy ones only adjust: no truncation removes the
        largest logit, except typical, which greedy leaves out too."""
        return tuple(stage for stage in self.sampler_order if self._does(stage))

    def _does(self, stage: str) -> bool:
        """Whether a stage changes anything."""
        if stage in ADJUSTMENTS:
            return self.has_penalties if stage == "penalties" else bool(self.logit_bias)
        return (
            not self.is_greedy
            and {
                "top_k": self.top_k > 0,
                "typical": self.typical_p < 1,
                "top_p": self.top_p < 1,
                "min_p": self.min_p > 0,
                "temperature": self.temperature != 1,
            }[stage]
        )

    def check_vocabulary(self, size: int) -> None:
        """Raise :class:`UsageError` if a token id is outside a vocabulary of ``size``."""
        used = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "bad_words": [token for word in self.bad_words if not isinstance(word, str) for token in word],
        }
        for name, tokens in used.items():
            for token in tokens:
                if token >= size:
                    raise UsageError(
                        f"{named(name)} names token {token}: the vocabulary has {size}, 0 to {size - 1}"
                    )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        _known_fields(changes)
        limit = changes.pop("max_tokens", None)
        if limit is not None and changes.setdefault("max_new_tokens", limit) != limit:
            raise _two_limits(changes["max_new_tokens"], limit)
        return dataclasses.replace(self, max_tokens=None, **changes)

    def __repr__(self) -> str:
        """The fields that are not at their defaults."""
        fields = dataclasses.fields(self)
        values = {f.name: getattr(self, f.name) for f in fields}
        defaults = {f.name: {} if f.default is dataclasses.MISSING else f.default for f in fields}
        return shown_fields("SamplingParams", **{k: v for k, v in values.items() if v != defaults[k]})

    # -- where it comes from ------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """From a dict of fields. Raises :class:`UsageError` for an unknown field."""
        _known_fields(fields)
        return cls(**fields)

    @classmethod
    def from_generation_config(
        cls, config: Mapping[str, Any], where: str = "generation_config.json"
    ) -> SamplingParams:
        """What the makers of a model recommend. Raises :class:`ModelError`, naming ``where`` and the key,
        for a value that is out of range."""
        try:
            with parameter_words():  # the file's names, mostly
                return cls(**recommended_fields(config))
        except UsageError as error:
            raise ModelError(f"{where}: {error}") from error

    # -- validation -----------------------------------------------------------------------------------

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _number(
        self,
        name: str,
        allowed: str,
        low: float = -math.inf,
        high: float = math.inf,
        above: float | None = None,
    ) -> float:
        value = getattr(self, name)
        value = _as_float(value)
        if not math.isfinite(value):
            raise _refused(name, getattr(self, name), f"a number, {allowed}")
        if not low <= value <= high or (above is not None and value <= above):
            raise _refused(name, value, allowed)
        self._set(name, value)
        return value

    def _integer(self, name: str, low: int, high: int | None, allowed: str) -> None:
        value = getattr(self, name)
        if not _is_whole(value):
            raise _refused(name, value, f"a whole number, {allowed}")
        value = int(value)
        if value < low or (high is not None and value > high):
            raise _refused(name, value, allowed)
        self._set(name, value)

    def _boolean(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise _refused(name, getattr(self, name), "true or false")

    def _checked_order(self) -> tuple[str, ...]:
        order, known = self.sampler_order, ", ".join(STAGES)
        if isinstance(order, str) or not isinstance(order, Sequence):
            raise _refused("sampler_order", order, f"a list of these: {known}")
        for i, stage in enumerate(order):
            if stage not in STAGES:
                raise _refused("sampler_order", stage, f"a list of these: {known}", "names")
            if stage in order[:i]:
                raise UsageError(f"{named('sampler_order')} names {stage} twice: list each stage once")
        return tuple(order)

    def _refuse_contradictions(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"{named('min_new_tokens')} is {self.min_new_tokens} and {named('max_new_tokens')} "
                f"{self.max_new_tokens}: "
                "the minimum must not be above the maximum"
            )
        if self.penalty_window == 0:
            raise UsageError(
                f"{named('penalty_window')} is 0, so penalties would do nothing: give a number of "
                "tokens or -1 (all)"
            )
        for stage in STAGES:
            if stage not in self.sampler_order and self._does(stage):
                raise UsageError(
                    f"{named('sampler_order')} leaves out {stage}, which is set: add it to "
                    "the order, or do not set it"
                )


def _max_tokens(params: SamplingParams) -> int:
    """Another name of ``max_new_tokens``."""
    return params.max_new_tokens


SamplingParams.max_tokens = property(_max_tokens)  # type: ignore[attr-defined]  # an InitVar is no field


def _two_limits(new_tokens: object, tokens: object) -> UsageError:
    return UsageError(
        f"max_new_tokens is {quoted(new_tokens)} and max_tokens {quoted(tokens)}: they are one setting"
    )


def _checked_processors(processors: object) -> tuple[LogitsProcessor, ...]:
    if callable(processors):
        processors = (processors,)
    if isinstance(processors, (str, bytes)) or not isinstance(processors, Sequence):
        raise _refused("logits_processors", processors, "a function, or a list of functions")
    for function in processors:
        if not callable(function):
            raise _refused("logits_processors", function, "a list of functions", "has")
    return tuple(processors)


def recommended_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`SamplingParams` that a ``generation_config.json`` recommends.

    ``do_sample: false`` recommends greedy decoding, whatever else there is; without ``do_sample`` a
    temperature, top_k or top_p says that sampling is meant. Temperature is then 1 unless given.
    """
    given = {name: config[key] for name, (key, _) in RECOMMENDED.items() if config.get(key) is not None}
    samples = config.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _refused("do_sample", samples, "true or false")
    if samples is None:
        samples = bool({"temperature", "top_k", "top_p", "min_p", "typical_p"} & set(given))
    if samples:
        given.setdefault("temperature", 1.0)
    else:
        given = {name: value for name, value in given.items() if name == "repetition_penalty"}
    return {name: v for name, v in given.items() if v != RECOMMENDED[name][1] or name == "temperature"}


def named(field: str) -> str:
    """A field in an error message: its name in Python, its option on the command line."""
    return setting(field, option=OPTIONS.get(field, field))


def _refused(name: str, value: object, allowed: str, verb: str = "is") -> UsageError:
    """``verb``: after the name, such as "has" or "of token 5 is"."""
    shown = f"{value:g}" if isinstance(value, float) else quoted(value)
    return UsageError(f"{named(name)} {verb} {shown}: it must be {allowed}")


def _known_fields(fields: Mapping[str, Any]) -> None:
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in names and name != "max_tokens":
            raise UsageError(f"there is no sampling parameter {name!r}: they are {', '.join(names)}")


def _is_whole(value: object) -> TypeGuard[numbers.Integral]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _as_float(value: object) -> float:
    """NaN for what is no number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return math.inf


def _is_token(value: object) -> TypeGuard[numbers.Integral]:
    return _is_whole(value) and 0 <= int(value) < 2**31


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise _refused(name, ids, "a list of token ids")
    for token in ids:
        if not _is_token(token):
            raise _refused(name, token, "a list of token ids, which are whole numbers from 0", "names")
    return tuple(int(token) for token in ids)


def _checked_bias(bias: object) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise _refused("logit_bias", bias, "a map from token ids to numbers")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if not _is_token(token):
            raise _refused(
                "logit_bias", token, "a map from token ids, which are whole numbers from 0", "names"
            )
        amount = _as_float(value)
        if amount != -math.inf and not abs(amount) <= MAX_BIAS:
            allowed = "between -1e30 and 1e30, or -inf to ban it"
            raise _refused("logit_bias", value, allowed, f"of token {token} is")
        checked[int(token)] = amount
    return FrozenMap(checked)


def _checked_stop(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence) or isinstance(stop, bytes):
        raise _refused("stop", stop, "a list of strings")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise _refused("stop", text, "a list of non-empty strings", "has")
    return tuple(stop)


def _checked_bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str):
        words = (words,)
    if not isinstance(words, Sequence) or isinstance(words, bytes):
        raise _refused("bad_words", words, "a list of strings or of lists of token ids")
    checked: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            if not word.strip():
                raise _refused("bad_words", word, "a list of non-empty strings", "has")
            checked.append(word)
        else:
            ids = _checked_ids("bad_words", word)
            if not ids:
                raise _refused("bad_words", ids, "a list of words of at least one token", "has")
            checked.append(ids)
    return tuple(checked)
