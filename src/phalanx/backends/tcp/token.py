"""The job's token: the secret by which its ranks know each other.

    PHALANX_TOKEN        the token itself
    PHALANX_TOKEN_FILE   a file that holds it, which only its owner may read (chmod 600)

Never on a command line, which everybody on the host can read, and never in a message, whoever it
is for: errors here say how long a token is, at most.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from phalanx.errors import AuthenticationError

__all__ = ["LEAST_BYTES", "check_token", "find_token"]

LEAST_BYTES = 16  # 128 bits, if they are random
MOST_BYTES = 4096
MAKE_ONE = 'python -c "import secrets; print(secrets.token_hex(32))"'


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token that the environment gives, or ""; PHALANX_TOKEN goes before the file.

    The file's content counts without white space at its ends. `AuthenticationError` when the file
    cannot be read, is readable for others than its owner, or belongs to somebody else, and when
    the token is shorter than 128 bits.
    """
    token = environ.get("PHALANX_TOKEN", "")
    if token:
        return check_token(token, "PHALANX_TOKEN")
    path = environ.get("PHALANX_TOKEN_FILE", "")
    if path:
        return check_token(_read(path), f"the token in {path} (PHALANX_TOKEN_FILE)")
    return ""


def check_token(token: str, name: str) -> str:
    """Return `token`. `AuthenticationError`, which calls it `name`, if it is too short to be one.

    The length is all that can be checked: whether it was drawn at random, nobody can see.
    """
    size = len(token.encode())
    if size < LEAST_BYTES:
        raise AuthenticationError(
            f"{name} has {size} bytes, and a token has {LEAST_BYTES} (128 bits) at least: who can "
            f"call a rank can try short ones one after the other. Make one with {MAKE_ONE}"
        )
    return token


def _read(path: str) -> str:
    """The text in a file that is fit for a secret."""
    try:
        # Not to wait for a writer, if it is a pipe; asked about the open file, not the name.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AuthenticationError(
            f"the token file {path} (PHALANX_TOKEN_FILE) cannot be read: {error.strerror}"
        ) from None
    try:
        problem = _problem(os.fstat(descriptor))
        if problem:
            raise AuthenticationError(
                f"the token file {path} {problem}; it has to be a file that only you can read: "
                f"chmod 600 {path}"
            )
        content = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MOST_BYTES:
        raise AuthenticationError(f"the token file {path} is longer than {MOST_BYTES} bytes")
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise AuthenticationError(
            f"the token file {path} is not text: a token is; make one with {MAKE_ONE}"
        ) from None


def _problem(status: os.stat_result) -> str:
    """Why a file is not fit for a secret, or ""."""
    if not stat.S_ISREG(status.st_mode):
        return "is no ordinary file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process is user {os.geteuid()}'s"
    mode = stat.S_IMODE(status.st_mode)
    return f"is open to others (mode {mode:04o})" if mode & 0o077 else ""
