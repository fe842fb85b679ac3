"""Python files of a published wheel, without installing it and, where the index allows, without downloading it.

A vLLM wheel is a quarter of a gigabyte, of which a test reads a few files. pip says where the wheel is; the files are
then read out of the remote archive by byte ranges: a few megabytes, about a second.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

BLOCK = 1 << 17  # bytes of one request


class Unavailable(Exception):
    """The wheel cannot be had here; says why."""


class _Ranges(io.RawIOBase):
    """A remote file, read by HTTP range requests."""

    def __init__(self, url: str):
        self.url = url
        self.position = 0
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=30) as answer:
            if answer.headers.get("Accept-Ranges") != "bytes":
                raise Unavailable(f"{url}: the server does not serve byte ranges")
            self.size = int(answer.headers["Content-Length"])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{last}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise Unavailable(f"{self.url}: expected status 206, got {answer.status}")
            data = answer.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def url(requirement: str) -> str:
    """Where pip would download the wheel of a requirement from."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", "--retries", "1", "--timeout", "20", "--report", "-", requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"pip could not be asked for {requirement}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"pip finds no wheel for {requirement}: {done.stderr.strip().splitlines()[-1:]}")
    return str(json.loads(done.stdout)["install"][0]["download_info"]["url"])


def members(requirement: str, names: Iterable[str], root: Path) -> Path:
    """Put the named files of a wheel under `root` unless they are there already. A name may end in "/": all .py below.

    Files that the wheel lacks are left out: whether they ought to be there is for the caller to say. Several processes
    may ask at once: each unpacks beside `root`, and the first to finish moves its copy into place.
    """
    wanted = sorted(names)
    label = "\n".join(wanted)
    done = root / ".complete"
    if done.is_file() and done.read_text() == label:
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root.parent))
    try:
        remote = url(requirement)
        raw = io.FileIO(remote.removeprefix("file://")) if remote.startswith("file://") else _Ranges(remote)
        with zipfile.ZipFile(io.BufferedReader(raw, BLOCK)) as archive:
            for name in archive.namelist():
                below = any(w.endswith("/") and name.startswith(w) and name.endswith(".py") for w in wanted)
                if below or name in wanted:
                    archive.extract(name, scratch)
        (scratch / ".complete").write_text(label)
        if root.exists() and not (done.is_file() and done.read_text() == label):
            shutil.rmtree(root)
        with contextlib.suppress(OSError):  # another process was first
            scratch.rename(root)
    except (OSError, zipfile.BadZipFile) as error:
        raise Unavailable(f"the wheel of {requirement} cannot be read: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return root


def cache_root(variable: str, config: pytest.Config) -> Path:
    """Where unpacked sources are kept: the folder named by an environment variable, else pytest's cache."""
    named = os.environ.get(variable)
    if named:
        return Path(named).expanduser()
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    return Path(cache.mkdir("sources")) if cache is not None else Path(tempfile.mkdtemp())
