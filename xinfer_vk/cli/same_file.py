"""An output must not replace what a command reads, by whatever name or link it is given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from xinfer_vk.errors import UsageError


def refuse_inputs(option: str, path: str, inputs: Mapping[str, str | None]) -> None:
    """Raise :class:`UsageError` if ``path``, the value of ``option``, is one of the files in ``inputs``
    (option to file; a directory stands for every file in it)."""
    if not os.path.exists(path):
        return
    for name, given in inputs.items():
        if given is None or not os.path.exists(given):  # "-", or the name of a model
            continue
        if any(os.path.samefile(path, file) for file in _files(given)):
            inside = "in the directory" if os.path.isdir(given) else "the file"
            raise UsageError(f"{option} {path} is {inside} of {name}: write to another file")


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (file for name in names if os.path.exists(file := os.path.join(folder, name)))
