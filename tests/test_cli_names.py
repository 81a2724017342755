"""Names on the command line: suggestions for near misses, what short options mean, names of models."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import click
import pytest

from xinfer_vk.cli.app import COMMANDS, cli, run
from xinfer_vk.cli.list import describe_age
from xinfer_vk.errors import ModelError, UsageError
from xinfer_vk.names import did_you_mean, match_name
from xinfer_vk.weights import local, pull
from xinfer_vk.weights.hub import resolve_model

ROOT = Path(__file__).parent.parent
BENCH_SHORT = {"-p", "-n", "-d"}  # as in llama-bench


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder of downloaded models, empty at first."""
    monkeypatch.setenv("XINFER_VK_CACHE", str(tmp_path))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def all_commands():
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", c) for sub, c in command.commands.items())


# -- mistakes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generate", "-n", "-3"], "--max-new-tokens: -3 is out of range: use at least 1"),
        (["generate", "-n", "x"], "--max-new-tokens: 'x' is not a valid integer"),
        (["genrate"], "no such command 'genrate': did you mean generate?"),
        (["zzz"], f"no such command 'zzz': choose from {', '.join(COMMANDS)}"),
        (["bench", "compar"], "no such command 'compar': did you mean compare?"),
        (["generate", "--promtp", "x"], "no such option --promtp: did you mean --prompt or --prompts?"),
        (["generate", "-x"], "no such option -x: see `xinfer-vk generate --help`"),
        (["generate", "--model"], "--model needs a value: see `xinfer-vk --help`"),
        (["inspect"], "MODEL is missing: see `xinfer-vk inspect --help`"),
        (["estimate", "a", "b"], "unexpected argument b: see `xinfer-vk estimate --help`"),
        (["generate", "--kv-dtype", "f8"], "--kv-dtype: 'f8' is not one of 'f16', 'f32', 'q8_0', 'q4_0'"),
        (["quantize", "a", "b"], "--type is missing: see `xinfer-vk quantize --help`"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(capsys, arguments, line):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {line}\n")


def test_no_command_at_all_prints_the_help(capsys):
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_a_short_option_means_the_same_in_every_command():
    meanings = defaultdict(set)
    for name, command in all_commands():
        for parameter in command.params:
            for option in getattr(parameter, "opts", ()):
                if re.fullmatch("-[a-zA-Z]", option) and not (name == "bench" and option in BENCH_SHORT):
                    meanings[option].add(max(parameter.opts, key=len))
    assert {option: long for option, long in meanings.items() if len(long) > 1} == {}


def test_bench_says_that_its_short_options_are_llama_benchs(capsys):
    run(["bench", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "-p, -n and -d mean what they mean in llama-bench" in text


def test_every_command_line_in_the_documents_has_options_that_exist():
    commands = dict(all_commands())
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in re.findall(
            r"(?:xinfer-vk|\./run) ((?:bench compare|[a-z-]+)[^`\n|>]*)", page.read_text()
        ):
            name = next((n for n in ("bench compare", line.split()[0]) if line.startswith(n)), "")
            if name in commands:
                known = {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
                line = re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", line)
                given = re.findall(r"(?<=\s)--?[a-z][a-z-]*", line)
                assert set(given) <= known | {"--help", "-h"}, f"{page.name}: {line}"


# -- names of models --------------------------------------------------------------------------------


def test_names_match_without_case_and_by_their_beginning():
    names = ["smollm2-135m", "smollm2-360m", "gemma3-270m"]
    assert match_name("Gemma3-270M", names, "model") == match_name("ge", names, "model") == "gemma3-270m"
    assert match_name("smollm2-1", names, "model") == "smollm2-135m"
    assert match_name("x", names, "model") is match_name("", names, "model") is None
    assert match_name("a", ["a", "ab"], "model") == "a"  # a whole name is no beginning of another
    with pytest.raises(UsageError, match="'smol' is ambiguous: choose from smollm2-135m, smollm2-360m"):
        match_name("SMOL"[:4].lower(), names, "model")
    assert did_you_mean("smolm2-135", names).startswith("did you mean smollm2-135m")
    assert did_you_mean("zzz", names) == ""


def test_a_file_in_the_models_folder_is_a_model_by_its_name(models, monkeypatch):
    mine = models / "My-Model.Q4_K.gguf"
    mine.write_bytes(b"x" * 10)
    demo = models / pull.DEMO.file_name
    demo.write_bytes(b"x")
    monkeypatch.setattr("xinfer_vk.weights.hub.ensure_model", lambda name, progress: models / name)
    assert resolve_model("my-mod") == resolve_model("my-model.q4_k") == mine
    assert resolve_model("SmolLM2") == models / "smollm2-135m"  # checked, and downloaded again if need be
    with pytest.raises(ModelError, match=r"no such file, directory or model: did you mean My-Model\.Q4_K"):
        resolve_model("my-modle.q4_k")


def test_list_shows_names_sizes_and_ages(models, capsys):
    assert run(["list"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "xinfer-vk pull" in err
    (models / pull.DEMO.file_name).write_bytes(b"x" * 1500)
    for part in (1, 2):
        (models / f"big-0000{part}-of-00002.gguf").write_bytes(b"x" * 10)
    assert run(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["NAME", "SIZE", "MODIFIED"],
        ["big", "20", "B", "just", "now"],
        ["smollm2-135m", "1.5", "kB", "just", "now"],
    ]
    assert run(["list", "--json"]) == 0
    assert [m["name"] for m in json.loads(capsys.readouterr().out)] == ["big", "smollm2-135m"]
    ages = [describe_age(s) for s in (5, 60, 7300, 3 * 86400)]
    assert ages == ["just now", "1 minute ago", "2 hours ago", "3 days ago"]


def test_rm_deletes_models_by_their_whole_names_only(models, capsys):
    demo = models / pull.DEMO.file_name
    demo.write_bytes(b"x")
    parts = [models / f"big-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"x" * 5)
    assert run(["rm", "smollm2"]) == 2 and demo.exists()
    assert "'smollm2': did you mean smollm2-135m?" in capsys.readouterr().err
    assert run(["rm", "../x"]) == 2
    capsys.readouterr()
    assert run(["rm", "BIG", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == "deleted big (10 B)\ndeleted smollm2-135m (1 B)\n"
    assert list(models.iterdir()) == [] and local.local_models() == {}


# -- completion -------------------------------------------------------------------------------------


def completed(capsys, monkeypatch, *words):
    """What a shell gets for the last word."""
    monkeypatch.setenv("_XINFER_VK_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(("xinfer-vk", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        run([])
    return capsys.readouterr().out.split()


def test_the_shell_completes_commands_options_models_and_shapes(models, capsys, monkeypatch):
    (models / "Mine.gguf").write_bytes(b"x")
    assert completed(capsys, monkeypatch, "comp") == ["plain,compare-decoding"]
    assert completed(capsys, monkeypatch, "generate", "--speed") == ["plain,--speed-report"]
    assert completed(capsys, monkeypatch, "generate", "-m", "m") == ["plain,Mine"]
    assert completed(capsys, monkeypatch, "inspect", "g") == ["plain,gemma3-270m"]
    assert completed(capsys, monkeypatch, "chat", "-m", "./x") == ["file,./x"]
    assert completed(capsys, monkeypatch, "rm", "M") == ["plain,Mine"]
    assert completed(capsys, monkeypatch, "estimate", "--shape", "tiny") == ["plain,tinyllama-1.1b"]
