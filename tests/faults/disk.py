"""A small disk that is really full: a file system in memory that only those see who enter its namespace."""

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MOUNT = 'mount -t tmpfs -o size="$2",nr_inodes=1000 none "$1" && echo ready && exec sleep 300'


class NotAllowedError(RuntimeError):
    """Mounting is not allowed here."""


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[int]:
    """Mount ``size`` bytes at ``path`` in a namespace of its own; gives the process that holds it.

    Raises:
        NotAllowedError: The system does not allow it.
    """
    path.mkdir()
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", _MOUNT, "sh", str(path), size]
    if shutil.which(command[0]) is None:
        raise NotAllowedError("mounting a file system needs `unshare`, which is not here")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as holder:
        assert holder.stdout is not None
        try:
            said = holder.stdout.readline().strip()
            if said != "ready":
                raise NotAllowedError(f"mounting a file system is not allowed here: {said}")
            yield holder.pid
        finally:
            holder.kill()


def enter(holder: int) -> None:
    """See the file systems that process ``holder`` sees; the caller must have one thread only."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{holder}/ns/mnt", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(descriptor)


def seen_by(holder: int, path: Path) -> Path:
    """Where others find what ``holder`` sees at ``path``."""
    return Path(f"/proc/{holder}/root{path}")


def fill(folder: Path) -> None:
    """Write until the disk that ``folder`` is on takes no more."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
