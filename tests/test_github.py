"""What GitHub reads (.github/): valid files, which name commands, paths and versions that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import xinfer_vk
from xinfer_vk.cli.app import cli

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
TEXTS = [*sorted(path for path in GITHUB.rglob("*") if path.is_file()), ROOT / "SECURITY.md"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("dependabot", [GITHUB / "dependabot.yml"]),
    ],
)
def test_files_follow_githubs_schema(schema: str, files: list[Path]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout + done.stderr


def test_ci_calls_run_test_on_lavapipe_and_on_both_devices() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    for name in ("test", "debian"):
        assert [s for s in jobs[name]["steps"] if s.get("run") == "./run test"], name
    assert jobs["macos"]["continue-on-error"] is True  # nobody has run it there


def test_ci_has_the_oldest_and_the_newest_python_that_pyproject_names() -> None:
    versions = read(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert {declared[0], declared[-1]} <= set(versions) <= set(declared)


def test_jobs_are_bounded_in_time_and_can_write_nothing_by_default() -> None:
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path
        for name, job in workflow["jobs"].items():
            assert "uses" in job or job["timeout-minutes"] <= 90, (path, name)


def test_workflows_of_this_repository_that_are_called_exist() -> None:
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            if job.get("uses", "").startswith("./"):
                assert "workflow_call" in read(ROOT / job["uses"])[True]  # YAML 1.1 reads `on` as true


def test_a_release_checks_the_version_where_it_is_written() -> None:
    commands = [step["run"] for step in steps(GITHUB / "workflows" / "release.yml") if "run" in step]
    line = f'__version__ = "{xinfer_vk.__version__}"'
    assert line in (ROOT / "xinfer_vk" / "__init__.py").read_text(encoding="utf-8").splitlines()
    assert any("xinfer_vk/__init__.py" in command for command in commands)


def test_commands_that_are_named_exist() -> None:
    known = cli.list_commands(click.Context(cli))
    for path in TEXTS:
        for command in re.findall(r"[`/]xinfer-vk ([a-z-]+)", path.read_text(encoding="utf-8")):
            assert command in known or command.startswith("--"), (path, command)


def test_paths_that_are_named_exist() -> None:
    pattern = r"(?<![\w./-])((?:docs|tests|xinfer_vk|shaders|benchmarks|build_support)/[\w./-]*\w)"
    for path in TEXTS:
        for name in re.findall(pattern, path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), (path, name)


def test_links_lead_to_the_repository_of_pyproject() -> None:
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    for link in read(GITHUB / "ISSUE_TEMPLATE" / "config.yml")["contact_links"]:
        assert link["url"].startswith(home)


def test_forms_ask_for_what_tells_a_bug_of_the_device_from_ours() -> None:
    for name in ("bug.yml", "device.yml"):
        text = (GITHUB / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8")
        assert "xinfer-vk devices --json" in text and "xinfer-vk selftest" in text and "--version" in text


def test_cibuildwheel_builds_every_python_and_leaves_the_loader_out() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = pyproject["tool"]["cibuildwheel"]
    declared = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    assert settings["build"].split() == [f"cp3{minor}-*" for minor in declared]
    assert "--exclude libvulkan.so.1" in settings["linux"]["repair-wheel-command"]
