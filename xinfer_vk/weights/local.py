"""The models in the cache folder, which ``xinfer-vk pull`` fills: their names, listed and deleted.

A model of :data:`~xinfer_vk.weights.pull.MODELS` has the name that it is pulled by; any other GGUF file that
somebody put there is called by its file name without ``.gguf``.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.fields import quoted
from xinfer_vk.names import did_you_mean, match_name
from xinfer_vk.weights.gguf_file import PART_NAME
from xinfer_vk.weights.pull import MODELS, PART_PREFIX, models_dir


@dataclass(frozen=True)
class LocalModel:
    """A downloaded model. ``files``: one, or the parts of a split GGUF file in order."""

    name: str
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.files[0]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def modified_s(self) -> float:
        """When the newest file was written, in seconds since 1970."""
        return max(file.stat().st_mtime for file in self.files)


def local_models() -> dict[str, LocalModel]:
    """The models in the cache folder by name, sorted. Empty where there is no folder."""
    pulled = {model.file_name: name for name, model in MODELS.items()}
    files: dict[str, list[Path]] = {}
    for path in sorted(models_dir().glob("*.gguf")):
        if path.is_file():
            part = PART_NAME.fullmatch(path.name)
            stem = path.stem if part is None else part["stem"]
            files.setdefault(pulled.get(path.name, stem), []).append(path)
    return {name: LocalModel(name, tuple(files[name])) for name in sorted(files, key=str.lower)}


def find_name(text: str) -> str | None:
    """The one of :func:`known_names` that is meant; case does not matter, and a unique beginning is enough.
    Raises :class:`UsageError` for the beginning of several."""
    return match_name(text, known_names(), "model")


def known_names() -> list[str]:
    """The names that ``--model`` takes beside paths and hub names: downloaded models, and those to pull."""
    return sorted({*local_models(), *MODELS})


def remove_model(name: str) -> tuple[int, str]:
    """Delete a downloaded model's files, and what is left of an interrupted download of it. Returns the bytes
    that were freed and the model's name.

    ``name``: whole; case does not matter. Raises :class:`UsageError` for a model that is not there and
    :class:`ModelError` for a file that cannot be deleted.
    """
    local = local_models()
    found = next((model for key, model in local.items() if key.lower() == name.lower()), None)
    if found is None:
        remedy = did_you_mean(name, local) or "`xinfer-vk list` shows those there are"
        raise UsageError(f"no downloaded model is called {quoted(name)}: {remedy}")
    freed = found.bytes
    try:
        for file in found.files:
            file.unlink()
    except OSError as error:
        raise ModelError(f"cannot delete {file}: {error.strerror or error}") from error
    shutil.rmtree(models_dir() / f"{PART_PREFIX}{found.name}", ignore_errors=True)
    return freed, found.name
