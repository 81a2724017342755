"""The alphabet of byte-level BPE: every byte as one printable character.

GPT-2 gave each of the 256 bytes a character of its own, so that a vocabulary of byte strings can be
written as text: a byte that is a visible Latin-1 character stands for itself, the 68 others (controls,
spaces, the soft hyphen) take the characters from U+0100 on, in order. A space is "Ġ", a newline "Ċ".
"""

from __future__ import annotations

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in set(_VISIBLE)]

CHAR_OF_BYTE: dict[int, str] = {
    **{byte: chr(byte) for byte in _VISIBLE},
    **{byte: chr(0x100 + i) for i, byte in enumerate(_HIDDEN)},
}
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def token_to_bytes(token: str) -> bytes:
    """The bytes a token of the vocabulary stands for.

    A token with a character outside the alphabet was not made by byte-level training; it stands for
    its own text.
    """
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
