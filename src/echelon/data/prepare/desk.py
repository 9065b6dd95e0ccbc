"""The folder that work in progress lies in: every result is whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from echelon.core.errors import DataError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _LOCK = "state.json", "lock"
_LAYOUT = 3
"""Of what lies here: what another release has begun is begun anew."""


class Desk:
    """Files by stage and number. A result (`.json`) is written last: where it is, all is."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stage: str, number: int, suffix: str) -> Path:
        return self.root / stage / f"{number:06d}.{suffix}"

    def stage(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def put(self, path: Path, content: bytes) -> None:
        """Whole or not at all."""
        aside = self.aside(path)
        aside.write_bytes(content)
        aside.replace(path)

    @staticmethod
    def aside(path: Path) -> Path:
        return path.with_name(f"{path.name}.part")

    def finish(self, stage: str, number: int, result: Any) -> Any:
        self.put(self.path(stage, number, "json"), json.dumps(result).encode())
        return result

    def result(self, stage: str, number: int) -> Any | None:
        """What `finish` was given, if it was."""
        return _read(self.path(stage, number, "json"))

    def remember(self, name: str, value: Any) -> Any:
        self.put(self.root / f"{name}.json", json.dumps(value).encode())
        return value

    def recall(self, name: str) -> Any | None:
        return _read(self.root / f"{name}.json")

    def clear(self, *stages: str) -> None:
        for stage in stages:
            shutil.rmtree(self.root / stage, ignore_errors=True)

    def remove(self, stage: str, suffix: str) -> None:
        """What nobody will read again."""
        for path in (self.root / stage).glob(f"*.{suffix}"):
            path.unlink(missing_ok=True)


class Claim:
    """A desk that is ours: nobody else works in it, and what lies there is of the same work."""

    def __init__(self, root: Path, digest: str) -> None:
        self.desk = Desk(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{root}: {error.strerror}") from None
        try:
            self._lock()
            self.resumed = self._same(digest)
        except BaseException:
            os.close(self._handle)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"{self.desk.root}: another process is preparing this folder now"
            ) from None

    def _same(self, digest: str) -> bool:
        """Keep what was done for the same digest, unless the machine fell and files may be torn."""
        state = {"digest": digest, "boot": _boot(), "layout": _LAYOUT}
        if self.desk.recall("state") == state:
            return True
        for entry in self.desk.root.iterdir():
            if entry.name != _LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.desk.remember("state", state)
        return False

    def close(self, *, remove: bool) -> None:
        if remove:
            shutil.rmtree(self.desk.root, ignore_errors=True)
        os.close(self._handle)


def _boot() -> str:
    with suppress(OSError):
        return _BOOT.read_text(encoding="utf-8").strip()
    return ""


def _read(path: Path) -> Any | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
