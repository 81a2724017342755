"""Turns what a user calls a model into a path: a path, a name of `pull`, or a name on the hub.

Names on the Hugging Face hub are fetched by ``huggingface_hub`` (the extra ``hub``), into its own
cache, which other programs share. A model that is whole in that cache is used without asking the
network.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from xinfer_vk.errors import DownloadError, ModelError, UsageError
from xinfer_vk.fields import parse_json, quoted
from xinfer_vk.names import did_you_mean
from xinfer_vk.weights.local import find_name, known_names, local_models
from xinfer_vk.weights.mapped import read_small_file
from xinfer_vk.weights.pull import MODELS, Progress, ensure_model
from xinfer_vk.weights.safetensors_file import INDEX_NAME, MAX_INDEX_BYTES

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILE = re.compile(rf"({HUB_NAME.pattern})/([\w./-]+\.gguf)")

# What loading reads. Repositories carry the same weights in other formats beside these.
PATTERNS = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    INDEX_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
]


def resolve_model(text: str, progress: Progress | None = None) -> Path:
    """The directory or ``.gguf`` file of a model.

    ``text``: a path; a name of ``xinfer-vk list`` or ``pull``, in any case, or a unique beginning of one (a
    model to pull is downloaded if it is not there, unless it has terms to agree to); ``owner/name`` or
    ``owner/name/file.gguf`` on the hub. A path that exists wins. Raises :class:`UsageError`,
    :class:`ModelError` or :class:`DownloadError`.
    """
    if not text.strip():
        raise UsageError("the model's name is empty: give a directory, a .gguf file or a name on the hub")
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        return path
    name = None if "/" in text else find_name(text)
    if name is not None:
        return ensure_model(name, progress) if name in MODELS else local_models()[name].path
    file = HUB_FILE.fullmatch(text)
    if file is not None:
        return _hub_file(file[1], file[2])
    if HUB_NAME.fullmatch(text) and not text.endswith((".gguf", ".safetensors", ".json")):
        return _hub_directory(text)
    if near := did_you_mean(text, known_names()):
        raise ModelError(f"{quoted(text)}: no such file, directory or model: {near}")
    raise ModelError(
        f"{quoted(text)}: no such file or directory: give a model directory, a .gguf file, "
        f"{' or '.join(MODELS)}, or a name on the hub such as Qwen/Qwen2.5-0.5B-Instruct"
    )


def _hub_directory(name: str) -> Path:
    hub = _import_hub(name)
    try:
        cached = Path(hub.snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
        if _is_complete(cached):
            return cached
    except hub.errors.HFValidationError as e:
        raise UsageError(f"{quoted(name)} is not a name on the hub: {_line(e)}") from None
    except Exception:
        pass  # not in the cache: the network will tell
    try:
        path = Path(hub.snapshot_download(name, allow_patterns=PATTERNS, max_workers=4))
    except Exception as e:
        raise _hub_error(hub, name, e) from None
    if not _is_complete(path):
        raise ModelError(
            f"{name}: the repository has no complete set of config.json and safetensors weights; a GGUF file "
            f"in it is named {name}/FILE.gguf"
        )
    return path


def _hub_file(name: str, file: str) -> Path:
    hub = _import_hub(name)
    try:
        return Path(hub.hf_hub_download(name, file, local_files_only=True))
    except Exception:
        pass  # not in the cache
    try:
        return Path(hub.hf_hub_download(name, file))
    except Exception as e:
        raise _hub_error(hub, f"{name}/{file}", e) from None


def _import_hub(name: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise DownloadError(
            f"{name} is no path here; to fetch it from the Hugging Face hub, huggingface_hub is needed: run "
            "`pip install 'xinfer-vk[hub]'`"
        ) from None
    if not sys.stderr.isatty():
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    return huggingface_hub


def _is_complete(path: Path) -> bool:
    """Whether a snapshot has all it needs. A broken link of an interrupted download does not exist."""
    if not (path / "config.json").exists():
        return False
    if (path / "model.safetensors").exists():
        return True
    index = path / INDEX_NAME
    if not index.exists():
        return False
    shards = parse_json(read_small_file(index, MAX_INDEX_BYTES), str(index)).get("weight_map")
    return isinstance(shards, dict) and all((path / str(shard)).exists() for shard in set(shards.values()))


def _hub_error(hub: Any, name: str, error: Exception) -> DownloadError:
    """What went wrong, in one line with the remedy. The classes derive from each other: order matters."""
    e = hub.errors
    page = "https://huggingface.co/" + "/".join(name.split("/")[:2])
    if isinstance(error, e.GatedRepoError):
        return DownloadError(f"{name} is gated: accept its terms at {page}, then log in with `hf auth login`")
    if isinstance(error, e.RepositoryNotFoundError):
        return DownloadError(
            f"{name}: no such repository on the hub (or it is private: log in with `hf auth login`)"
        )
    if isinstance(error, e.EntryNotFoundError) and not isinstance(error, e.LocalEntryNotFoundError):
        return DownloadError(f"{name}: the repository has no such file, see {page}")
    if isinstance(error, e.OfflineModeIsEnabled):
        return DownloadError(f"{name} is not in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DownloadError(f"{name}: the disk is full: make room, or set HF_HOME to a folder elsewhere")
    unreachable = isinstance(error, e.LocalEntryNotFoundError)  # what is left of it, when all tries failed
    reason = "the hub did not answer" if unreachable else f"{type(error).__name__}: {_line(error)}"
    return DownloadError(
        f"{name} is not in the hub's cache and could not be fetched ({reason}): check the network, or give a "
        "model directory or a .gguf file"
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "…"
