"""What a user calls a model becomes a path, or one line that says what to do.

The hub is played by a small stand-in with ``huggingface_hub``'s functions and error classes; the real
package, where it is installed, is tried on a cache on the disk and on a network that is not there.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from model_files import tiny_config, write_gguf_model, write_hf_model

from xinfer_vk.errors import DownloadError, ModelError, UsageError
from xinfer_vk.weights.hub import PATTERNS, resolve_model
from xinfer_vk.weights.source import open_model


class FakeHub(ModuleType):
    """``huggingface_hub`` over a folder: ``cached`` has what the cache holds, ``remote`` the hub."""

    def __init__(self, cached: Path | None = None, remote: Path | None = None) -> None:
        super().__init__("huggingface_hub")
        self.errors = errors_module()
        self.utils = ModuleType("huggingface_hub.utils")
        self.utils.disable_progress_bars = lambda: None  # type: ignore[attr-defined]
        self.cached, self.remote = cached, remote
        self.failure: Exception | None = None
        self.calls: list[tuple[str, bool]] = []

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], local_files_only: bool = False, max_workers: int = 8
    ) -> str:
        assert allow_patterns == PATTERNS
        return self._get(name, local_files_only)

    def hf_hub_download(self, name: str, file: str, *, local_files_only: bool = False) -> str:
        return str(Path(self._get(name, local_files_only)) / file)

    def _get(self, name: str, local: bool) -> str:
        self.calls.append((name, local))
        if local:
            if self.cached is None:
                raise self.errors.LocalEntryNotFoundError("nothing cached")
            return str(self.cached)
        if self.failure is not None:
            raise self.failure
        return str(self.remote)


def errors_module() -> Any:
    """The part of ``huggingface_hub.errors`` that matters, deriving from each other as there."""
    module: Any = ModuleType("huggingface_hub.errors")
    module.HFValidationError = type("HFValidationError", (ValueError,), {})
    module.HfHubHTTPError = type("HfHubHTTPError", (OSError,), {})
    module.RepositoryNotFoundError = type("RepositoryNotFoundError", (module.HfHubHTTPError,), {})
    module.GatedRepoError = type("GatedRepoError", (module.RepositoryNotFoundError,), {})
    module.EntryNotFoundError = type("EntryNotFoundError", (Exception,), {})
    module.LocalEntryNotFoundError = type(
        "LocalEntryNotFoundError", (module.EntryNotFoundError, FileNotFoundError), {}
    )
    module.OfflineModeIsEnabled = type("OfflineModeIsEnabled", (ConnectionError,), {})
    return module


def install(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    for name, module in (("", fake), (".errors", fake.errors), (".utils", fake.utils)):
        monkeypatch.setitem(sys.modules, f"huggingface_hub{name}", module)
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models--tiny--llama" / "snapshots" / "0123"
    write_hf_model(folder, tiny_config("llama"), shards=2)
    return folder


def test_a_path_that_exists_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model("owner/name") == Path("owner/name")  # even if the hub had one, too
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize(
    "text", ["models/missing.gguf", "./nothing", "/no/such/place", "a/b/c/d", "C:\\x", "plain"]
)
def test_a_path_that_is_not_there_is_said(text: str) -> None:
    with pytest.raises(ModelError, match=r"no such file or directory: give a model directory, a \.gguf file"):
        resolve_model(text)


@pytest.mark.parametrize("text", ["x\0y", "x" * 5000, "\ud800", "~nobody-of-this-name/x", "a\nb"])
def test_a_name_that_cannot_be_a_path_is_one_line(text: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory") as caught:
        resolve_model(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_empty_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="the model's name is empty"):
        resolve_model(" ")


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"run `pip install 'xinfer-vk\[hub\]'`"):
        resolve_model("Qwen/Qwen2.5-0.5B-Instruct")


def test_a_model_whole_in_the_cache_needs_no_network(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(FakeHub(cached=model), monkeypatch)
    assert resolve_model("tiny/llama") == model
    assert fake.calls == [("tiny/llama", True)]
    with open_model(model) as source:
        assert source.name == "tiny/llama"


@pytest.mark.parametrize(
    "lacking", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_a_model_in_part_in_the_cache_is_completed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    part = tmp_path / "part"
    write_hf_model(part, tiny_config("llama"), shards=2)
    (part / lacking).unlink()
    fake = install(FakeHub(cached=part, remote=model), monkeypatch)
    assert resolve_model("tiny/llama") == model
    assert [local for _, local in fake.calls] == [True, False]


def test_a_file_of_a_repository_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf_model(tmp_path / "tiny-f32.gguf", tiny_config("llama"))
    fake = install(FakeHub(remote=tmp_path), monkeypatch)
    assert resolve_model("tiny/llama-GGUF/tiny-f32.gguf") == tmp_path / "tiny-f32.gguf"
    assert fake.calls == [("tiny/llama-GGUF", True), ("tiny/llama-GGUF", False)]


def test_a_repository_without_safetensors_says_how_to_name_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeHub(remote=tmp_path), monkeypatch)
    with pytest.raises(
        ModelError, match=r"tiny/llama: the repository has no complete set .* tiny/llama/FILE\.gguf"
    ):
        resolve_model("tiny/llama")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("GatedRepoError", r"is gated: accept its terms at https://huggingface\.co/tiny/llama, then log in"),
        ("RepositoryNotFoundError", "no such repository on the hub"),
        ("EntryNotFoundError", "the repository has no such file"),
        ("OfflineModeIsEnabled", "not in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it"),
        ("LocalEntryNotFoundError", "could not be fetched .*check the network"),
        ("HfHubHTTPError", "could not be fetched .*check the network"),
    ],
)
def test_what_goes_wrong_on_the_hub_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, error: str, expected: str
) -> None:
    fake = install(FakeHub(), monkeypatch)
    fake.failure = getattr(fake.errors, error)("first line\nsecond line " + "x" * 1000)
    for name in ("tiny/llama", "tiny/llama/x.gguf"):
        with pytest.raises(DownloadError, match=expected) as caught:
            resolve_model(name)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_full_disk_and_a_dead_network_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(FakeHub(), monkeypatch)
    fake.failure = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DownloadError, match="the disk is full: make room, or set HF_HOME"):
        resolve_model("tiny/llama")
    fake.failure = TimeoutError("timed out")
    with pytest.raises(DownloadError, match=r"TimeoutError: timed out\): check the network"):
        resolve_model("tiny/llama")


# -- the real package ----------------------------------------------------------------------------


@pytest.fixture
def real_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the real ``huggingface_hub`` that holds one model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    repository = cache / "models--tiny--llama"
    write_hf_model(repository / "snapshots" / "0123abcd", tiny_config("llama"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_the_real_package_finds_a_cached_model(real_cache: Path) -> None:
    path = resolve_model("tiny/llama")
    with open_model(path) as source:
        assert source.name == "tiny/llama"
        assert json.loads((path / "config.json").read_text()) == source.metadata


def test_the_real_packages_errors_are_one_line(real_cache: Path) -> None:
    for name in ("tiny/missing", "tiny/missing/x.gguf"):
        with pytest.raises(DownloadError) as caught:
            resolve_model(name)
        assert "\n" not in str(caught.value)
        assert "tiny/missing" in str(caught.value)
