from __future__ import annotations

import pytest

from sparkhvd.data.files import LIMIT, OpenFiles

pytestmark = pytest.mark.pure


class File:
    def __init__(self, number: int) -> None:
        if number < 0:
            raise FileNotFoundError(number)
        self.number, self.is_closed = number, False

    def close(self) -> None:
        self.is_closed = True


def test_most_recently_used_files_stay_open() -> None:
    made: list[File] = []

    def open_file(number: int) -> File:
        made.append(File(number))
        return made[-1]

    files: OpenFiles[int, File] = OpenFiles(open_file)
    for number in range(LIMIT):
        files.get(number)
    assert files.get(0) is made[0]
    with pytest.raises(FileNotFoundError):
        files.get(-1)
    files.get(LIMIT)  # one too many: the least recently used one is removed
    assert [f.number for f in made if f.is_closed] == [1]
    assert files.get(1) is not made[1]
    assert [f.number for f in made if f.is_closed] == [1, 2]
    files.close()
    assert all(f.is_closed for f in made)
