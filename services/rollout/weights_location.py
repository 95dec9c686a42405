"""From a weights_uri to a directory that this service may read.

Only `file://` URIs of absolute paths are known. Symbolic links and `..` are resolved, of the
directory and of every file in it, and all must lie below the weights root: a caller can never
make the service read anything else.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from rollpacker.rpc.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError


def weights_directory(uri: str, root: Path) -> Path:
    """The directory that `uri` names, resolved.

    Raises InvalidArgumentError (not a file URI), PermissionDeniedError (WEIGHTS_OUTSIDE_ROOT),
    NotFoundError (WEIGHTS_NOT_FOUND).
    """
    parts = urlsplit(uri)
    path = unquote(parts.path)
    local = parts.scheme == "file" and parts.netloc in ("", "localhost")
    if not (local and path.startswith("/") and path.isprintable()):
        raise InvalidArgumentError.field(
            "spec.weights_uri", f"{uri!r} is no local directory; give file:///absolute/directory"
        )
    resolved_root = root.resolve()
    directory = Path(path).resolve()
    _check_below(directory, resolved_root, uri)
    if not directory.is_dir():
        raise NotFoundError(
            "WEIGHTS_NOT_FOUND", f"{uri} is no directory; publish the weights first"
        )
    for entry in directory.iterdir():
        _check_below(entry.resolve(), resolved_root, uri)
    return directory


def _check_below(path: Path, root: Path, uri: str) -> None:
    if not path.is_relative_to(root):
        raise PermissionDeniedError(
            "WEIGHTS_OUTSIDE_ROOT",
            f"{uri} leads to {path}, which is not below the weights root {root};"
            " publish there, or start the service with another weights_root",
        )
