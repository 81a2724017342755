"""Writes a model as a GGUF file in another number format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from xinfer_vk.errors import UsageError, setting
from xinfer_vk.text.gguf_export import tokenizer_metadata
from xinfer_vk.weights.formats import FORMATS
from xinfer_vk.weights.gguf_export import exported_config, exported_tensors
from xinfer_vk.weights.gguf_file import PART_NAME, read_gguf
from xinfer_vk.weights.gguf_writer import encoded, refuse_existing, write_gguf
from xinfer_vk.weights.quantize.choice import check_type
from xinfer_vk.weights.quantize.loading import quantized_tensors
from xinfer_vk.weights.safetensors_file import close_all
from xinfer_vk.weights.source import ModelSource, open_model
from xinfer_vk.weights.tensors import TensorInfo, element_count

# What a file can be written as, with the numbers that general.file_type has for them (gguf-py's
# LlamaFileType: the type that most tensors have).
FILE_TYPES = {"q8_0": 7, "q6_k": 18, "q4_k": 14, "q4_1": 3, "q4_0": 2, "f16": 1, "bf16": 32}
QUANTIZATION_VERSION = 2  # of the block formats' layouts; 1 is before May 2023


@dataclass(frozen=True)
class Written:
    """What was written. ``bytes``: of the file. ``weights``: how many, in all tensors, which take
    ``weight_bytes``. ``formats``: how many tensors each format has. ``notes``: what the user should know, a
    line each."""

    path: Path
    bytes: int
    weights: int
    weight_bytes: int
    formats: dict[str, int]
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weight_bytes / self.weights


def quantize_model(
    model: Path,
    out: Path,
    kind: str,
    *,
    overwrite: bool = False,
    requantize: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write ``model`` (a directory in Hugging Face layout or a GGUF file) as the GGUF file ``out``, its
    matrices in format ``kind``. ``requantize``: those too that are low-bit already, which adds errors to
    errors.

    Nothing larger than a piece of a tensor is held in memory. Raises :class:`UsageError` for a ``kind`` that
    is not supported, for an ``out`` that exists, is named as a part, is a file of the model itself or cannot
    be written, and for a model that is low-bit already; :class:`ModelError` for one that is damaged or cannot
    be expressed in GGUF.
    """
    check_type(kind, tuple(FILE_TYPES))
    if out.suffix != ".gguf":
        raise UsageError(f"{out}: the name of a GGUF file ends in .gguf")
    if PART_NAME.fullmatch(out.name):
        raise UsageError(
            f"{out}: is the name of one part of several, and one file is written: use another name"
        )
    _refuse_itself(out, [model])
    refuse_existing(out, overwrite)
    with open_model(model) as source:
        _refuse_itself(out, source.files)
        if source.kind == "gguf":
            keys, tensors = _from_gguf(source)
        else:
            tensors = exported_tensors(source)
            names = [tensor.name for tensor in tensors]
            described = {
                **exported_config(source.config, names, str(source.path)),
                "general.type": "model",
                "general.name": source.name,
                **tokenizer_metadata(source),
            }
            keys = {key: encoded(value) for key, value in described.items()}
        keys["general.file_type"] = encoded(FILE_TYPES[kind])
        keys["general.quantization_version"] = encoded(QUANTIZATION_VERSION)
        try:
            changed, notes = quantized_tensors(
                {tensor.name: tensor for tensor in tensors},
                kind,
                tied=source.config.tie_word_embeddings,
                requantize=requantize,
                where=source.name,
            )
            _refuse_formats(changed.values(), source.name)
            size = write_gguf(
                out, keys, list(changed.values()), progress or (lambda done, total: None), overwrite=overwrite
            )
        finally:
            close_all({tensor.name: tensor for tensor in tensors})
    formats = Counter(tensor.fmt for tensor in changed.values())
    weights = sum(element_count(tensor.shape) for tensor in changed.values())
    weight_bytes = sum(tensor.bytes for tensor in changed.values())
    return Written(out, size, weights, weight_bytes, dict(formats.most_common()), notes)


def _refuse_itself(out: Path, files: Iterable[Path]) -> None:
    """Raise :class:`UsageError` if ``out`` is one of the model's files, by this name or through a link."""
    if out.exists() and any(out.samefile(file) for file in set(files) if file.exists()):
        raise UsageError(
            f"{out}: is the model that is read, and its copy of fewer bits would replace it: use another name"
        )


def _refuse_formats(tensors: Iterable[TensorInfo], name: str) -> None:
    for tensor in tensors:
        if tensor.fmt not in FORMATS:
            raise UsageError(
                f"{name} has tensors in {tensor.fmt} (GPTQ or AWQ), which GGUF files cannot hold: "
                f"{setting('allow_requantize')} converts them"
            )


def _from_gguf(source: ModelSource) -> tuple[dict[str, bytes], list[TensorInfo]]:
    """The file's own keys, as they stand there, and its tensors, in its order and under its names."""
    gguf = read_gguf(source.path)
    keys = {
        key: value.tobytes()
        for key, value in gguf.encoded.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    return keys, list(gguf.tensors.values())
