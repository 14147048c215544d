"""The shared secret that authenticates the launchers of an elastic job on several machines. Standard library only.

It is the value of SHARDWISE_JOB_SECRET, or else the content of the file SHARDWISE_JOB_SECRET_FILE, by default
``shardwise/job-secret`` in the user's configuration folder. The first launcher creates a missing file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping

from shardwise.errors import LaunchError
from shardwise.runtime.private import open_own

SECRET = "SHARDWISE_JOB_SECRET"  # variables with this prefix are not passed to the ranks
SECRET_FIX = f"give every machine the same file, or the same {SECRET}"
_FILE = f"{SECRET}_FILE"
_FEWEST_BYTES, _MOST_BYTES = 16, 4096


def job_secret(environment: Mapping[str, str]) -> bytes:
    """Return the secret of this user's jobs. Raises LaunchError for one that others can read or guess."""
    if SECRET in environment:
        return _long_enough(environment[SECRET].encode("utf-8", "surrogateescape"), SECRET)
    settings = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = environment.get(_FILE) or os.path.join(settings, "shardwise", "job-secret")
    try:
        if not os.path.lexists(path):
            _make(path)
        descriptor = open_own(path)
        with open(descriptor, "rb") as file:
            if os.fstat(descriptor).st_mode & 0o077:
                what = f"other users may read the job's secret in {path}"
                raise LaunchError(what, fix=f"chmod 600 {path}, with a new secret in it")
            return _long_enough(file.read(_MOST_BYTES), path)
    except OSError as error:
        what = f"cannot read or make the job's secret: {error}"
        raise LaunchError(what, fix=f"set {_FILE} to a file of yours, or {SECRET} to a text") from error


def _make(path: str) -> None:
    """Create the file atomically: only the first of several launchers succeeds."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:  # of mode 600
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _long_enough(content: bytes, source: str) -> bytes:
    secret = content.strip()
    if len(secret) < _FEWEST_BYTES:
        what = f"the job secret in {source} has {len(secret)} bytes, and needs at least {_FEWEST_BYTES}"
        raise LaunchError(what, fix="create one: python -c 'import secrets; print(secrets.token_hex(32))'")
    return secret
