"""Memory of another process, by its file and its token."""

import os

import pytest

from mntrain.comm import shared_memory

TOKEN = b"0123456789abcdef"


def test_what_is_not_the_others_memory_is_not_taken_for_it(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(100) + TOKEN)
    assert len(shared_memory._map(str(file), 100, TOKEN)) == 100
    for nbytes, token in ((99, TOKEN), (100, TOKEN[::-1])):
        with pytest.raises(OSError, match="another process's"):
            shared_memory._map(str(file), nbytes, token)
    with pytest.raises(OSError, match="No such file"):
        shared_memory._map(str(tmp_path / "none"), 100, TOKEN)
    assert file.read_bytes() == bytes(100) + TOKEN
    assert os.listdir(tmp_path) == ["file"]
