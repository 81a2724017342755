"""How a text is cut into words before BPE, by the name a GGUF file gives it.

BPE never merges across the cuts, so the wrong cuts give other tokens than the model was trained on: a
name that is not known here is refused, never guessed. The definitions were compared with the tokenizers of
GPT-2, SmolLM2, Qwen3, Llama 3, GPT-4o and Mistral Nemo (``tests/fixtures/check_real_tokenizers.py``).

The patterns are facts of those tokenizers. Reading them: ``\\p{L}`` letters, ``\\p{N}`` numbers, ``\\s``
white space; a word takes the space before it along; the alternatives are tried from left to right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xinfer_vk.errors import ModelError
from xinfer_vk.fields import quoted

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"  # letters, with any one other character before them
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # the last space before a word belongs to the word

# Words whose capitals come first, as GPT-4o cuts them: "CamelCase" is two. Letters without case are both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased_words(ending: str) -> str:
    return f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"


QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SYMBOLS}|{SPACES}"  # every digit alone
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"  # digits in threes
GPT4O = rf"{_cased_words(CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}|{SPACES}"
TEKKEN = rf"{_cased_words('')}|\p{{N}}|{_SYMBOLS_AND_SLASHES}|{SPACES}"


@dataclass(frozen=True)
class PreTokenization:
    """What a family does to a text before BPE.

    ``pattern``: the words, None for GPT-2's own, which ``tokenizers`` has built in. ``digits_alone``:
    numbers are cut into digits first. ``nfc``: the text is normalized to NFC. ``ignore_merges``: a
    word that is in the vocabulary is taken whole, whatever the merges would make of it. ``add_bos``:
    a begin-of-sequence token goes first unless the file says otherwise.
    """

    pattern: str | None = None
    digits_alone: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> Normalizer | None:
        from tokenizers import normalizers

        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = []
        if self.digits_alone:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated", invert=False))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenization()
_DIGITS = PreTokenization(digits_alone=True)
_QWEN2 = PreTokenization(QWEN2, nfc=True)
_LLAMA3 = PreTokenization(LLAMA3, ignore_merges=True, add_bos=True)

_CL100K = PreTokenization(LLAMA3)

# ``tokenizer.ggml.pre`` to what it means, as llama.cpp reads it, for the families that are supported. The
# models that a name does not say: StarCoder's are Granite Code's, Refact's are Granite 3's, those of DBRX are
# OLMo 2's and Phi-4's, those of Smaug are SmolLM3's, GPT-4o's are Phi-4-mini's, Tekken's are Mistral Nemo's.
BY_NAME: dict[str, PreTokenization] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "gpt-4o": PreTokenization(GPT4O),
    "tekken": PreTokenization(TEKKEN, ignore_merges=True, add_bos=True),
}


def pre_tokenization(name: str | None, where: str) -> PreTokenization:
    """What ``tokenizer.ggml.pre`` names. Raises :class:`ModelError` for a name that is not known, and
    for "default" or no name, which say that the converter did not know it either."""
    if name is None or name == "default":
        said = "is missing" if name is None else 'is "default"'
        raise ModelError(
            f"{where}: tokenizer.ggml.pre {said}, so the file does not say how to cut words: "
            "convert the model again with a current llama.cpp"
        )
    found = BY_NAME.get(name)
    if found is None:
        raise ModelError(f"{where}: tokenizer.ggml.pre is {quoted(name)}, supported: {', '.join(BY_NAME)}")
    return found
