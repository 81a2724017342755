"""Compiled pipelines, kept on disk between runs: one file for each device and driver version.

The file is ours: a magic number, the SHA-256 of what follows, and the bytes that the driver gave. A driver
checks the header of such bytes (Vulkan 1.3, section 10.7.3) and may trust the rest, so a damaged file must
never reach it: anything that does not check out is ignored, and replaced at the next save.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from pathlib import Path

from xinfer_vk.folders import keep, optional_cache_folder

MAGIC = b"xinfer-vk pipelines 1\n"
DIGEST_BYTES = 32
HEADER = struct.Struct("<IIII16s")  # size, version, vendor, device, pipelineCacheUUID
MAX_BYTES = 512 << 20

_log = logging.getLogger(__name__)


class PipelineCacheFile:
    """``vendor_id``, ``device_id`` and ``cache_uuid`` (hex) are what the driver will want to see in the
    header; ``driver`` (name and version) goes into the file's name."""

    def __init__(
        self, folder: Path, *, device_uuid: str, driver: str, vendor_id: int, device_id: int, cache_uuid: str
    ) -> None:
        tag = hashlib.sha256(driver.encode()).hexdigest()[:16]
        self.path = folder / f"{device_uuid}-{tag}.bin"
        self._expected = (1, vendor_id, device_id, bytes.fromhex(cache_uuid))
        self._on_disk = b""  # digest of what the file holds

    def load(self) -> bytes:
        """The driver's bytes, or b"" when there is no file or it is damaged or another driver's."""
        try:
            if not 0 < self.path.stat().st_size <= MAX_BYTES:
                return b""
            content = self.path.read_bytes()
        except OSError:
            return b""
        start = len(MAGIC) + DIGEST_BYTES
        digest, data = content[len(MAGIC) : start], content[start:]
        if not content.startswith(MAGIC) or hashlib.sha256(data).digest() != digest or not self._fits(data):
            _log.info("ignoring the damaged pipeline cache %s", self.path)
            return b""
        self._on_disk = digest
        return data

    def save(self, data: bytes) -> bool:
        """Write the file whole, if ``data`` is worth keeping and not what it holds already. A folder that
        cannot be written is no error: the next run compiles again. Returns whether it wrote."""
        digest = hashlib.sha256(data).digest()
        if digest == self._on_disk or len(data) > MAX_BYTES or not self._fits(data):
            return False
        if not keep(self.path, MAGIC + digest + data):
            return False
        self._on_disk = digest
        return True

    def _fits(self, data: bytes) -> bool:
        if len(data) < HEADER.size:
            return False
        size, *rest = HEADER.unpack_from(data)
        return HEADER.size <= size <= len(data) and tuple(rest) == self._expected


def pipeline_cache_folder() -> Path | None:
    """Where the files are kept; None where there is no home directory to keep them in."""
    return optional_cache_folder("pipelines")
