"""A file of real bytes beside the journal that is given up when the disk is full, so that one more record fits."""

import errno
import os
import shutil
from pathlib import Path

BALLAST_BYTES = 1 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Ballast:
    """Reserved room at `path`. Random bytes, because btrfs and zfs store a run of zeros in no space at all."""

    def __init__(self, path: Path, size_bytes: int = BALLAST_BYTES) -> None:
        self.path = path
        self.size_bytes = size_bytes

    def fill(self) -> None:
        """Reserve the room. OSError where there is none; nothing is left behind then."""
        try:
            with self.path.open("wb") as file:
                file.write(os.urandom(self.size_bytes))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self.path.unlink(missing_ok=True)
            raise

    def refill(self) -> bool:
        """Reserve again if that leaves as much room free; True where the ballast is whole."""
        if self.path.exists() and self.path.stat().st_size >= self.size_bytes:
            return True
        if shutil.disk_usage(self.path.parent).free < 2 * self.size_bytes:
            return False
        try:
            self.fill()
        except OSError:
            return False
        return True

    def free(self) -> bool:
        """Give the room back to the file system; False where there was nothing to give."""
        try:
            had = self.path.stat().st_size > 0
            self.path.unlink()
        except OSError:
            return False
        return had
