"""A job gives other users of a node no port but on loopback, and no file."""

import sys

import pytest
from job import SMALL, completed, summary, write_corpus
from launch import mpirun

# A rank that notes where it connects to.
RANK = """
import sys
from mntrain.watchdog.side_channel import SideChannel

def noted(self, monitor, where, connect=SideChannel.connect):
    with open("connected", "a") as file:
        print(where[0], file=file)
    connect(self, monitor, where)

SideChannel.connect = noted
if __name__ == "__main__":
    from mntrain.__main__ import main
    sys.exit(main())
"""


@pytest.mark.thorough
def test_ranks_of_one_host_meet_on_loopback_and_files_are_as_private_as_the_umask_says(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    words = ["--data.path", str(write_corpus(tmp_path)), "--run.dir", "run", *SMALL]
    words += ["--checkpoint.every", "2", "--train.steps", "2"]
    command = ["sh", "-c", 'umask 077; exec "$@"', "sh", sys.executable, "rank.py", *words]
    completed(mpirun(2, command, cwd=tmp_path, timeout=250))
    assert summary(tmp_path)["status"] == "completed"
    assert set((tmp_path / "connected").read_text().split()) == {"127.0.0.1"}
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert (tmp_path / "run" / "recorder" / "rank-00001.bin") in made
    assert {
        path.name: oct(path.stat().st_mode) for path in made if path.stat().st_mode & 0o077
    } == {}
