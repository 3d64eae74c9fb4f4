"""The user's cache folder, of which only what this user alone has written is read; the checkout."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def pip_install(extra: str) -> str:
    """The command that adds an extra such as "mpi" to this package, however it was installed."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install 'ringcoll[{extra}]'"
    folder = "." if Path.cwd() == checkout else str(checkout)
    return f"pip install -e '{folder}[{extra}]'"


def user_folder(cache_dir: str | None, name: str) -> Path | None:
    """The folder of that name in the user's cache; None where the user has no home.

    ``cache_dir`` is the setting, ``RINGCOLL_CACHE_DIR`` included; None is ``ringcoll`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if cache_dir is not None:
        return Path(cache_dir).absolute() / name
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as its specification has it
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "ringcoll" / name


def own_folder(folder: Path) -> None:
    """Make a folder that only this user may use, if it does not exist.

    Raises:
        OSError: it cannot be made, or others may write to it.

    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder.stat())


def contents(path: Path, most: int | None = None) -> bytes:
    """The content of a file that only this user can have written.

    Raises:
        OSError: there is no such file, it has more than ``most`` bytes, is a link or a pipe, or
            others may write to it.

    """
    # A link may have been made by another user who can no longer write here.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        _check_owner(status)
        if most is not None and status.st_size > most:
            raise PermissionError(f"it has {status.st_size} bytes, more than {most}")
        return os.read(file, status.st_size)
    finally:
        os.close(file)


def write_aside(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: it cannot be written; nothing is left behind.

    """
    import tempfile  # not at every rank's start: few write

    file, aside = tempfile.mkstemp(prefix="new-", dir=path.parent)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(content)
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink()
        raise


def _check_owner(status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})")
