"""Files: what is not ours is not written into, what is no file not opened, nothing waited for."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from phalanx import files

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
STRANGER = 54321


def make(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as one, chdir(path.parent):
                one.bind(path.name)
        case "device":
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    make(kind, path)
    with pytest.raises(OSError, match=r"it is no regular file|No such device") as caught:
        files.read(str(path), 100, follow=True)
    assert caught.value.filename == str(path)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"x" * 100)
    assert files.read(str(path), 100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        files.read(str(path), 99)


def test_a_link_is_followed_only_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert files.read(str(tmp_path / "link"), 9, follow=True) == b"text"
    with pytest.raises(OSError, match=r"it is a link, which is not followed here.*/link"):
        files.read(str(tmp_path / "link"), 9)


def test_a_name_that_no_file_can_have_is_an_oserror(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="no file has such a name"):
            files.read(str(tmp_path / name), 9)


def test_no_new_file_is_made_in_a_folder_that_is_a_link_nor_over_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "other").symlink_to("folder/victim")
    with (
        pytest.raises(NotADirectoryError, match="it is a link"),
        files.new_file(str(tmp_path / "link" / "file")),
    ):
        pass
    with pytest.raises(FileExistsError), files.new_file(str(tmp_path / "other")):
        pass
    assert list((tmp_path / "folder").iterdir()) == []


def test_what_is_replaced_stays_as_it_is_under_its_other_names(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keys")
    os.link(tmp_path / "victim", tmp_path / "second")
    (tmp_path / "link").symlink_to("victim")
    for name in ("second", "link"):
        files.write(str(tmp_path / name), b"new", 0o600)
        assert (tmp_path / name).read_text() == "new"
        assert stat.S_IMODE((tmp_path / name).lstat().st_mode) == 0o600
    assert (tmp_path / "victim").read_text() == "keys"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """Else root would make a file of /dev/null."""
    make(kind, tmp_path / "it")
    before = (tmp_path / "it").lstat()
    with pytest.raises(OSError, match="it is no regular file"):
        files.write(str(tmp_path / "it"), b"new")
    assert os.path.samestat((tmp_path / "it").lstat(), before)
    with pytest.raises(OSError, match="it is no regular file"):
        files.write("/dev/null", b"new")


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fail() -> None:
        with files.replacing(str(tmp_path / "file")) as descriptor:
            os.write(descriptor, b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_file_of_ones_own_is_written_into_and_one_with_two_names_is_copied(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    for text in (b"a", b"b"):
        descriptor = files.own_file(str(path))
        os.pwrite(descriptor, text, path.stat().st_size)
        os.close(descriptor)
    os.link(path, tmp_path / "victim")
    descriptor = files.own_file(str(path))
    os.pwrite(descriptor, b"X", 1)
    os.close(descriptor)
    assert (path.read_text(), (tmp_path / "victim").read_text()) == ("aX", "ab")


@root_only
def test_a_strangers_file_is_replaced_by_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("theirs")
    os.chown(path, STRANGER, STRANGER)
    with path.open("rb") as before:
        os.close(files.own_file(str(path)))
        assert not os.path.samestat(os.fstat(before.fileno()), path.stat())
    assert (path.read_text(), path.stat().st_uid) == ("theirs", 0)


AS_A_STRANGER = """
import os, sys
from phalanx import files

os.setuid(int(sys.argv[2]))
try:
    files.own_file(sys.argv[1])
except PermissionError as error:
    print(error)
"""


@root_only
def test_where_anothers_file_cannot_be_replaced_its_owner_is_named() -> None:
    """As in /tmp: what is there may be renamed by its owner only."""
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        path = Path(folder, "log")
        path.write_text("theirs")
        command = [sys.executable, "-c", AS_A_STRANGER, str(path), str(STRANGER)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"it belongs to user 0: '{path}'" in said
        assert [each.read_text() for each in Path(folder).iterdir()] == ["theirs"]


def test_only_names_of_ours_are_removed_and_of_a_link_the_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("keys")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "ours").symlink_to("../victim")
    (folder / "theirs").write_text("")
    with files.folder(str(folder)) as at:
        assert files.remove_in(at, "ours".__eq__) == ["theirs"]
    assert [path.name for path in folder.iterdir()] == ["theirs"]
    assert (tmp_path / "victim").read_text() == "keys"
