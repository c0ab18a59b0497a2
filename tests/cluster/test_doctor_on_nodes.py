"""The doctor on emulated nodes: bad links are named, and a folder that hosts do not share."""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest
from job import SMALL

pytestmark = pytest.mark.cluster

SECONDS = 250
DOCTOR = [sys.executable, "-m", "mntrain", "doctor", "--json"]


def doctor(cluster, *words, prefix=()):
    command, environment = cluster.mpirun([*prefix, *DOCTOR, *words])
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.stdout.startswith("{"), ended.stderr
    report = json.loads(ended.stdout)
    return ended.returncode, report, {check["name"]: check for check in report["checks"]}


@pytest.mark.thorough
def test_the_node_that_sends_slowly_is_named(make_cluster, tmp_path):
    with make_cluster(ranks=(1, 1, 1), link="100mbit") as cluster:
        shape = ["root", "tbf", "rate", "5mbit", "burst", "16kb", "latency", "50ms"]
        slow = ["tc", "qdisc", "replace", "dev", "eth0", *shape]
        subprocess.run([*cluster.enter("n2"), *slow], check=True)
        code, report, checks = doctor(
            cluster, "--run.dir", str(tmp_path), "--expect", "100mbit", "--timeout", "80"
        )
    assert code == 1
    assert report["hosts"] == ["n1", "n2", "n3"]
    assert report["slowest_node"] == "n2"
    between = checks["links between nodes"]
    assert between["status"] == "fail"
    assert "directions is from n2 to n" in between["text"]
    # Short bursts pass the limits of its emulated link, so that others seem faster than they are.
    assert re.search("the slowest node is n2, by what it (receives and )?sends", between["text"])
    assert "of the expected 100mbit (12.5 MB/s)" in between["text"]
    links = report["links"]["between_nodes"]
    assert [link["hosts"] for link in links] == [["n1", "n2"], ["n1", "n3"], ["n2", "n3"]]
    there = [link["mb_per_s_there"] for link in links]
    back = [link["mb_per_s_back"] for link in links]
    assert max(back[0], there[2]) < 2  # what n2 sends: 5 Mbit/s and a burst
    assert min(there[0], there[1], back[1], back[2]) > 2 * max(back[0], there[2])
    assert checks["clocks"]["status"] == "pass"
    assert checks["shared files"]["status"] == "pass"


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("iptables") is None, reason="dropped packets need iptables")
def test_networks_that_drop_packets_are_named(make_cluster, tmp_path):
    """A firewall at a job's start, a smaller MTU on the way and lost packets, side by side."""
    arriving = ["iptables", "-A", "INPUT", "-p", "tcp", "-s"]
    with ExitStack() as stack:
        closed, small, lossy = (
            stack.enter_context(make_cluster(ranks=(1, 1), link="100mbit")) for _ in range(3)
        )
        for host, other in (("n1", "n2"), ("n2", "n1")):
            drop = [*closed.enter(host), *arriving, other, "-j", "DROP"]
            subprocess.run(drop, check=True)
            # What is not cut into segments by the interface is dropped by the switch.
            large = ["ip", "link", "set", "eth0", "mtu", "9000", "gso_max_segs", "1"]
            subprocess.run([*small.enter(host), *large], check=True)
        lost = ["-m", "statistic", "--mode", "nth", "--every", "12", "--packet", "0", "-j", "DROP"]
        subprocess.run([*lossy.enter("n2"), *arriving, "n1", *lost], check=True)
        train = [sys.executable, "-m", "mntrain", *SMALL, "--run.dir", str(tmp_path / "run")]
        jobs = [
            stack.enter_context(started(closed, train, tmp_path / "closed")),
            stack.enter_context(started(small, DOCTOR, tmp_path / "small")),
            stack.enter_context(started(lossy, DOCTOR, tmp_path / "lossy")),
        ]
        lines = [
            first_line(job, tmp_path / name, words)
            for job, name, words in zip(
                jobs,
                ("closed", "small", "lossy"),
                ("cannot connect", "has connected", "packets are lost"),
                strict=True,
            )
        ]
        assert all(job.wait(SECONDS) != 0 for job in jobs[:2])
    assert re.match(r"mntrain: warning: (n1 cannot connect to n2|n2 .* n1) \(10\.", lines[0])
    assert "firewall" in lines[0]
    assert "OMPI_MCA_btl_tcp_if_include" in lines[0]
    assert re.match(r"mntrain: error: (n1 has connected to n2|n2 .* n1) \(10\.", lines[1])
    assert "MTU 9000" in lines[1]
    assert "small messages pass and large ones do not" in lines[1]
    assert "between n1 and n2 packets are lost: " in lines[2]


@contextmanager
def started(cluster, command, output):
    """A job whose output goes to a file, and which ends with the block."""
    command, environment = cluster.mpirun(command)
    with output.open("wb") as file:
        job = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield job
    finally:
        job.terminate()
        try:
            job.wait(5)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def first_line(job, output, words):
    """The first line of a job's output with these words, as soon as it is there."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        over = job.poll() is not None
        text = output.read_text(errors="replace")
        if found := [line for line in text.splitlines() if words in line]:
            return found[0]
        assert not over, text
        time.sleep(0.2)
    raise AssertionError(f"no {words!r} in: {output.read_text(errors='replace')}")
