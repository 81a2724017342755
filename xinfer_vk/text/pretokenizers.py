"""How a text is cut into words before BPE, by the name a GGUF file gives it.

BPE never merges across the cuts, so the wrong cuts give other tokens than the model was trained on: a
name that is not known here is refused, never guessed. The four definitions were compared with the
tokenizers of GPT-2, SmolLM2, Qwen2 and Llama 3 themselves (see ``tests/test_tokenizer.py``).

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

QWEN2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SYMBOLS}|{SPACES}"  # every digit alone
LLAMA3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"  # digits in threes


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

# ``tokenizer.ggml.pre`` to what it means. Beside the four names there are those that llama.cpp reads as
# the same and that converters write for models of the Llama and Qwen2 architectures: StarCoder's and
# Refact's (Granite Code has them), R1's distillation to Qwen, and Llama 3's older names.
BY_NAME: dict[str, PreTokenization] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
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
