"""Checkpoints of several nodes on a file system whose clients write whole pages back."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_doctor_on_nodes import doctor

from mntrain.checkpoint.reader import inspect, list_checkpoints, verify

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]

SOURCE = Path(__file__).with_name("whole_pages.c")
SECONDS = 250
SAVES = 2
# Of odd sizes: no shard and no tensor begins at a page by itself.
JOB = """
import sys
import mntrain, torch
from torch import nn

with mntrain.init(device="cpu") as world:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(301, 199), nn.Linear(199, 97), nn.Linear(97, 3))
    optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01, stage=int(sys.argv[2]))
    checkpoints = world.checkpoints(sys.argv[1], model=model, optimizer=optimizer, every=1, keep=9)
    with checkpoints:
        for step in range(checkpoints.restore() + 1, int(sys.argv[3]) + 1):
            model(torch.randn(4, 301)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, now=True)
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The program of the file system; skips, with the reason, where it cannot be built or run."""
    if missing := [tool for tool in ("gcc", "pkg-config") if shutil.which(tool) is None]:
        pytest.skip(f"building a file system needs {', '.join(missing)}")
    if not Path("/dev/fuse").exists():
        pytest.skip("mounting a file system of one's own needs /dev/fuse")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if flags.returncode:
        pytest.skip("building a file system needs the headers of fuse3 (libfuse3-dev)")
    program = tmp_path_factory.mktemp("client") / "whole_pages"
    command = ["gcc", "-D_FILE_OFFSET_BITS=64", "-o", program, SOURCE, *flags.stdout.split()]
    subprocess.run(command, check=True)
    return program


@contextlib.contextmanager
def mounted(cluster, client, folder, page):
    """Mount the file system on all nodes at the same path; yield that, and the folder below it."""
    mount, back = folder / "mount", folder / "back"
    for path in (mount, back):
        path.mkdir()
    (back / "is mounted").touch()
    environment = os.environ | {"BACK": str(back), "PAGE": str(page)}
    started = [
        subprocess.Popen([*cluster.enter(host), client, "-f", "-s", mount], env=environment)
        for host in cluster.hosts
    ]
    try:
        for host in cluster.hosts:
            seen, deadline = [*cluster.enter(host), "test", "-e", mount / "is mounted"], 30
            deadline += time.monotonic()
            while subprocess.run(seen, check=False).returncode:
                if time.monotonic() > deadline:
                    pytest.skip(f"{host} cannot mount a file system")
                time.sleep(0.05)
        yield mount, back
    finally:
        for host in cluster.hosts:
            subprocess.run([*cluster.enter(host), "umount", mount], check=False)
        for process in started:
            process.terminate()
            process.wait()


def run(cluster, *words):
    command, environment = cluster.mpirun([sys.executable, "-c", JOB, *map(str, words)])
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    return done.returncode, done.stdout + done.stderr


# The bytes of a page, the ranks of each node, and the stage.
CASES = [(4096, (1, 1), 1), (64 << 10, (2, 1), 2), (64 << 10, (1, 1, 1), 0)]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES[1:])]
)
def test_checkpoints_are_sound_where_clients_write_whole_pages_back(
    make_cluster, client, tmp_path, case
):
    page, ranks, stage = case
    with (
        make_cluster(ranks=ranks, link=None) as cluster,
        mounted(cluster, client, tmp_path, page) as (mount, back),
    ):
        code, said = run(cluster, mount / "run", stage, SAVES)
        paths = list_checkpoints(back / "run")
        assert len(paths) == SAVES, said
        for path in paths:
            verify(path, inspect(path))
        assert code == 0, said
        code, said = run(cluster, mount / "run", stage, SAVES + 1)  # reads, too
        assert (code, len(list_checkpoints(back / "run"))) == (0, SAVES + 1), said


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * SECONDS)
def test_a_file_system_that_damages_checkpoints_all_the_same_is_named(
    make_cluster, client, tmp_path
):
    """Pages of 1 MiB: by the first save, which fails, and by the doctor."""
    with (
        make_cluster(ranks=(1, 1), link=None) as cluster,
        mounted(cluster, client, tmp_path, 1 << 20) as (mount, back),
    ):
        for number in range(6):  # whether both nodes hold a page at a time is a matter of luck
            code, said = run(cluster, mount / f"run{number}", 1, SAVES)
            if not (saved := list_checkpoints(back / f"run{number}")):
                break
            verify(saved[-1], inspect(saved[-1]))  # the first one
        assert saved == [], said
        assert code != 0, said
        assert "step-00000001 was not saved: " in said
        assert "reads otherwise" in said
        code, _, checks = doctor(cluster, "--run.dir", str(mount))
    assert code == 1
    assert checks["shared files"]["status"] == "fail"
    assert "checkpoints would be damaged" in checks["shared files"]["text"]
