"""The command lines of launchers, and the same for other hosts."""

import re
import shlex

import pytest

from mntrain.launch.hosts import Host
from mntrain.launch.launcher_command import LauncherCommand

THREE = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_NTASKS": "6"}


def command(line, environment=None):
    return LauncherCommand(shlex.split(line), environment or {})


def on(line, names, environment=None, *, full=2, open_mpi=False):
    """Return the command line on some of its hosts, and the hostfile that it names."""
    made, files = command(line, environment), []
    hosts = {host.name: host for host in made.hosts}

    def write(text):
        files.append(text)
        return "FILE"

    words = made.on([hosts[name] for name in names], full, open_mpi=open_mpi, write=write)
    return shlex.join(words), *files


@pytest.mark.parametrize(
    ("line", "environment", "hosts", "ranks", "needed"),
    [
        ("mpirun -n 4 -hosts a:2,b:2,c:2 python t.py -n 9", {}, "a b c", 4, 2),
        ("mpirun -np 6 --host a:2,b:2,c:2 python t.py", {}, "a b c", 6, 3),
        ("mpirun --mca btl self,tcp -H a,b --oversubscribe -np 4 python t.py", {}, "a b", 4, 2),
        ("mpirun -ppn 2 -n 4 -hosts a,b,c -genv A 1 python -c x", {}, "a b c", 4, 2),
        ("mpirun --output-directory / -H a:2,b:2 -n 2 python t.py", {}, "a b", 2, 1),
        ("mpirun --host=a,,b, -n 2 python t.py", {}, "a b", 2, 2),
        ("mpirun -n 4 python t.py", {}, "", 4, 1),
        ("mpirun -n 4 -hosts", {}, "", 4, 1),
        ("mpirun -n 4 python t.py", THREE, "n1 n2 n3", 4, 2),
        ("srun python t.py", THREE, "n1 n2 n3", 6, 3),
        ("srun -N2 -n4 --mpi=pmix python t.py", THREE, "n1 n2 n3", 4, 2),
        ("srun --nodes 1-2 --ntasks-per-node 3 -K -vv python t.py", THREE, "n1 n2 n3", 6, 2),
        ("srun -w n[2-3] -N 2 python t.py", THREE, "n2 n3", 6, 2),
        ("python -m mntrain -n 3", THREE, "", None, 1),
    ],
)
def test_hosts_ranks_and_how_many_hosts_are_needed(line, environment, hosts, ranks, needed):
    found = command(line, environment)
    assert [host.name for host in found.hosts] == hosts.split()
    assert (found.ranks if found.kind else None) == ranks
    assert found.needed() == needed


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("mpirun -H a:2,b:two python t.py", "-H a:2,b:two: 'b:two'"),
        ("mpirun -H :4 python t.py", "-H :4: ':4'"),
        ("mpirun -H a:0 python t.py", "-H a:0: 'a:0'"),
        ("mpirun -f FILE python t.py", "-f FILE: ':4'"),
    ],
)
def test_what_is_no_host_is_one_error_before_any_start(tmp_path, line, wrong):
    (tmp_path / "file").write_text("a:4\n:4 # no name\n")
    line, wrong = (text.replace("FILE", str(tmp_path / "file")) for text in (line, wrong))
    with pytest.raises(ValueError, match=re.escape(f"launch: {wrong} is no host: give names, ")):
        command(line)


def test_as_many_ranks_as_cores_are_no_number_of_ranks():
    found = command("mpirun -H a:*,b:auto,c python t.py").hosts
    assert found == [Host("a", None, "a:*"), Host("b", None, "b:auto"), Host("c", None, "c")]


def test_mpirun_gets_a_hostfile_in_the_place_of_the_given_hosts(tmp_path):
    file = tmp_path / "given"
    file.write_text("a:2 ifname=x\nb:2\nc:2\n")
    assert on("mpirun -n 4 -hosts a:2,b:2,c:2 python -f x", ["a", "c"]) == (
        "mpirun -f FILE -n 4 python -f x",
        "a:2\nc:2\n",
    )
    assert on(f"mpirun -f {file} -np 4 python t.py", ["c", "a"]) == (
        "mpirun -f FILE -np 4 python t.py",
        "c:2\na:2 ifname=x\n",
    )
    line = "mpirun --prtemca plm_ssh_agent /a --host a:2,b,c:2 -n 4 python"
    assert on(line, ["b", "c"], open_mpi=True) == (
        "mpirun --hostfile FILE --prtemca plm_ssh_agent /a -n 4 python",
        "b slots=1\nc slots=2\n",
    )


def test_mpirun_in_an_allocation_gets_its_hosts():
    assert on("mpirun -n 4 python t.py", ["n1", "n3"], THREE) == (
        "mpirun -f FILE -n 4 python t.py",
        "n1:2\nn3:2\n",
    )
    plain = {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert on("mpirun -n 5 python t.py", ["n1", "n3"], plain, open_mpi=True) == (
        "mpirun --hostfile FILE -n 5 python t.py",
        "n1 slots=3\nn3 slots=3\n",
    )


def test_fewer_hosts_get_fewer_ranks():
    assert on("mpirun -n 6 -hosts a:2,b:2,c:2 x", ["a", "c"], full=3)[0] == "mpirun -f FILE -n 4 x"
    assert on("mpirun -n 6 -hosts a,b,c x", ["a", "c"], full=3)[0] == "mpirun -f FILE -n 4 x"
    # Without a word on how many ranks a host takes, -n is meant for the hosts of the first start.
    assert on("mpirun -n 6 -hosts a,b,c x", ["a", "c"], full=2)[0] == "mpirun -f FILE -n 6 x"
    assert on("srun --ntasks=6 x", ["n1"], THREE, full=3)[0] == (
        "srun --ntasks=6 --nodes=1 --nodelist=n1 --ntasks=2 x"
    )


def test_srun_and_flux_run_get_hosts_before_the_program():
    assert on("srun --ntasks-per-node=2 -l python -N 7", ["n3", "n2"], THREE)[0] == (
        "srun --ntasks-per-node=2 -l --nodes=2 --nodelist=n3,n2 --ntasks=4 python -N 7"
    )
    made = command("flux run -n 4 python t.py", {})
    words = made.on([Host("f1"), Host("f3")], 2, open_mpi=False, write=str)
    assert shlex.join(words) == (
        "flux run -n 4 --nodes=2 --requires=host:f1,f3 --ntasks=4 python t.py"
    )


@pytest.mark.parametrize(
    ("line", "environment", "agent"),
    [
        ("mpirun -launcher ssh -launcher-exec /a -n 1 x", {}, "/a"),
        ("mpirun --prtemca plm_ssh_agent /b -n 1 x", {}, "/b"),
        ("mpirun -n 1 x", {"HYDRA_LAUNCHER_EXEC": "/c"}, "/c"),
        ("mpirun -n 1 x", {"PRTE_MCA_plm_ssh_agent": "/d"}, "/d"),
        ("mpirun -n 1 x", {}, ""),
    ],
)
def test_the_program_in_the_place_of_ssh_is_found(line, environment, agent):
    assert command(line, environment).agent == agent
