"""The job's token: where it comes from, what is too weak, and that it is shown to nobody."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import AuthenticationError
from phalanx.transport.tcp.admission import LEAST_BYTES, check_token, find_token

GOOD = secrets.token_hex(32)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(GOOD + "\n")
    path.chmod(0o600)
    return path


def test_without_a_token_there_is_none() -> None:
    assert find_token({}) == ""
    assert find_token({"PHALANX_TOKEN": "", "PHALANX_TOKEN_FILE": ""}) == ""


def test_the_environment_goes_before_the_file(token_file: Path) -> None:
    other = secrets.token_hex(32)
    files = {"PHALANX_TOKEN_FILE": str(token_file)}
    assert find_token({"PHALANX_TOKEN": other}) == other
    assert find_token(files) == GOOD, "without the end of its line"
    assert find_token({"PHALANX_TOKEN": other, **files}) == other


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_only_its_owner_can_open_is_a_token_file(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    assert find_token({"PHALANX_TOKEN_FILE": str(token_file)}) == GOOD


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602, 0o666, 0o610, 0o777])
def test_a_file_that_others_can_open_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(
        AuthenticationError, match=rf"mode 0{mode:o}.*chmod 600 {token_file}"
    ) as info:
        find_token({"PHALANX_TOKEN_FILE": str(token_file)})
    assert isinstance(info.value, PermissionError)
    assert GOOD not in str(info.value)


def test_a_file_behind_a_link_is_looked_at_itself(token_file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(token_file)
    assert find_token({"PHALANX_TOKEN_FILE": str(link)}) == GOOD
    token_file.chmod(0o644)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        find_token({"PHALANX_TOKEN_FILE": str(link)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_of_somebody_else_is_refused(token_file: Path) -> None:
    os.chown(token_file, 12345, -1)
    with pytest.raises(AuthenticationError, match="belongs to user 12345, and this process is"):
        find_token({"PHALANX_TOKEN_FILE": str(token_file)})


# A Secret in a pod whose user is not root. The volume holds links: all of it changes at once.
#
#     token -> ..data/token,  ..data -> ..2026_11_23_20_15_04.1/,  root:fsGroup, 0440

FS_GROUP = 54321


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A mounted Secret, and a process of its group."""
    if os.geteuid() != 0:
        pytest.skip("only root may give a file to a group that it chooses")
    (tmp_path / "..2026_11_23_20_15_04.1").mkdir()
    file = tmp_path / "..2026_11_23_20_15_04.1" / "token"
    file.write_text(GOOD)
    file.chmod(0o440)
    os.chown(file, 0, FS_GROUP)
    (tmp_path / "..data").symlink_to("..2026_11_23_20_15_04.1")
    (tmp_path / "token").symlink_to("..data/token")
    return tmp_path / "token"


@pytest.fixture
def _in_its_group() -> Iterator[None]:
    before = os.getgroups()
    os.setgroups([*before, FS_GROUP])
    yield
    os.setgroups(before)


@pytest.mark.usefixtures("_in_its_group")
def test_a_secret_of_a_group_of_the_process_is_a_token_file(secret: Path) -> None:
    assert find_token({"PHALANX_TOKEN_FILE": str(secret)}) == GOOD


@pytest.mark.usefixtures("_in_its_group")
@pytest.mark.parametrize("mode", [0o460, 0o640, 0o450, 0o444, 0o644])
def test_a_secret_that_is_open_to_more_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)
    in_a_pod = {"PHALANX_TOKEN_FILE": str(secret), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    with pytest.raises(AuthenticationError, match=f"mode 0{mode:o}.*defaultMode: 0400.*fsGroup"):
        find_token(in_a_pod)


@pytest.mark.usefixtures("_in_its_group")
def test_a_file_of_that_mode_and_group_that_is_not_roots_is_refused(secret: Path) -> None:
    os.chown(secret, 12345, FS_GROUP)
    with pytest.raises(AuthenticationError, match="belongs to user 12345"):
        find_token({"PHALANX_TOKEN_FILE": str(secret)})


def test_a_secret_of_a_group_of_others_is_refused(secret: Path) -> None:
    with pytest.raises(AuthenticationError, match=r"open to others \(mode 0440\)"):
        find_token({"PHALANX_TOKEN_FILE": str(secret)})


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(AuthenticationError, match="cannot be read: No such file"):
        find_token({"PHALANX_TOKEN_FILE": str(missing)})
    with pytest.raises(AuthenticationError, match="cannot be read: it is no regular file"):
        find_token({"PHALANX_TOKEN_FILE": str(tmp_path)})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)  # opened plainly, it would wait for a writer
    with pytest.raises(AuthenticationError, match="cannot be read: it is no regular file"):
        find_token({"PHALANX_TOKEN_FILE": str(pipe)})


def test_a_file_that_holds_no_text_or_too_much_is_refused(token_file: Path) -> None:
    token_file.write_bytes(b"\xff" * 32)
    with pytest.raises(AuthenticationError, match="is not text") as info:
        find_token({"PHALANX_TOKEN_FILE": str(token_file)})
    assert "xff" not in str(info.value)
    token_file.write_text("x" * 5000)
    with pytest.raises(AuthenticationError, match="more than 4,096 bytes"):
        find_token({"PHALANX_TOKEN_FILE": str(token_file)})


@pytest.mark.parametrize("size", [1, 8, LEAST_BYTES - 1])
def test_a_token_below_128_bits_is_refused_with_a_way_to_make_one(
    token_file: Path, size: int
) -> None:
    short = "q" * size
    token_file.write_text(short)
    for environ in ({"PHALANX_TOKEN": short}, {"PHALANX_TOKEN_FILE": str(token_file)}):
        with pytest.raises(AuthenticationError, match=f"has {size} bytes.*16.*phalanx token"):
            find_token(environ)
    assert check_token("q" * LEAST_BYTES, "it") == "q" * LEAST_BYTES


def test_an_empty_file_is_no_way_to_go_without_a_token(token_file: Path) -> None:
    token_file.write_text("\n")
    with pytest.raises(AuthenticationError, match="has 0 bytes"):
        find_token({"PHALANX_TOKEN_FILE": str(token_file)})
