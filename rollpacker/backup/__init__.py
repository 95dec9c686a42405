"""A run in one file, and back: `back_up` and `restore`."""

from rollpacker.backup.archive import BackupError, Manifest
from rollpacker.backup.run_backup import Places, back_up, restore

__all__ = ["BackupError", "Manifest", "Places", "back_up", "restore"]
