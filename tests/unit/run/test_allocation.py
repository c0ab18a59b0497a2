"""The end of a batch job, from what the commands of schedulers print.

The outputs have the form of real ones: of `qstat -f` of PBS Pro 12 and Torque 6 as kept by tests of
AiiDA (aiida-core, plugins for PBS Pro and Torque), of `bjobs` as described by IBM (LSF command
reference, bjobs -WL) and by SCR (scrjob/resmgrs/lsf.py), and of `flux job timeleft` as in the
manual page flux-job(1).
"""

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from mntrain.run.allocation import (
    SCHEDULERS,
    allocation_end,
    parse_flux,
    parse_lsf,
    parse_pbs,
    parse_slurm,
)

NOW = 1_800_000_000.0

PBS_PRO = """Job Id: 74164.mycluster
    Job_Name = train.job
    Job_Owner = user@mycluster.cluster
    resources_used.walltime = 10:45:13
    job_state = R
    ctime = Fri Apr 12 15:21:55 2013
    Error_Path = mycluster.cluster:/scratch/user/train/starting-from
\t-left/production/train.job.e74164
    Resource_List.nodect = 2
    Resource_List.select = 2:ncpus=16:mpiprocs=16
    Resource_List.walltime = 24:00:00
    stime = Mon Apr 22 07:17:36 2013
    session_id = 14147
    Variable_List = PBS_O_SYSTEM=Linux,PBS_O_SHELL=/bin/bash,
\tPBS_O_HOME=/home/user,PBS_O_LOGNAME=user,
\tstime = a value of the user's
    comment = Job run at Mon Apr 22 at 07:17 on (b270:ncpus=16)+(b275:ncpus=16)

    etime = Mon Apr 22 07:17:34 2013
    project = _pbs_project_default
"""

TORQUE = """Job Id: 8841233.qmaster
    Job_Name = train
    resources_used.walltime = 00:02:10
    job_state = R
    Resource_List.walltime = 04:00:00
    etime = Tue Aug 14 17:18:10 2018
    start_time = Tue Aug 14 17:18:16 2018
    Walltime.Remaining = 14266
    start_count = 1
"""

SLURM = "JobId=7 JobName=a StartTime=2026-01-01T00:00:00 EndTime={} Deadline=N/A"


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("24:00:00", 86400), ("00:30:05", 1805), ("2:00:00:00", 172800), ("3600", 3600)],
)
def test_pbs_states_the_start_and_the_limit(walltime, seconds):
    output = PBS_PRO.replace("24:00:00", walltime)
    assert parse_pbs(output, NOW) == datetime(2013, 4, 22, 7, 17, 36).timestamp() + seconds


def test_torque_states_the_seconds_that_are_left():
    assert parse_pbs(TORQUE, NOW) == NOW + 14266
    older = TORQUE.replace("    Walltime.Remaining = 14266\n", "")
    assert parse_pbs(older, NOW) == datetime(2018, 8, 14, 21, 18, 16).timestamp()


def test_a_pbs_job_without_a_limit_has_no_end():
    assert parse_pbs(PBS_PRO.replace("    Resource_List.walltime = 24:00:00\n", ""), NOW) is None


@pytest.mark.parametrize(
    ("output", "left_s"), [("0:12 L\n", 660), ("167:00 L", 601140), ("0:01 L", 0), ("0:00 L", 0)]
)
def test_lsf_states_minutes_of_which_the_last_may_not_be_whole(output, left_s):
    assert parse_lsf(output, NOW) == NOW + left_s


@pytest.mark.parametrize("output", ["-\n", "0:12 E", "0:00 X", "", "Job <7> is not found"])
def test_an_estimate_of_lsf_is_no_limit(output):
    assert parse_lsf(output, NOW) is None


@pytest.mark.parametrize(("output", "end"), [("3599\n", NOW + 3599), ("0\n", NOW)])
def test_flux_states_the_seconds_that_are_left(output, end):
    assert parse_flux(output, NOW) == end


@pytest.mark.parametrize("output", ["4294967295\n", "1e18", "inf"])
def test_a_flux_job_without_a_limit_has_no_end(output):
    assert parse_flux(output, NOW) is None


def test_slurm_states_the_end():
    assert parse_slurm(SLURM.format("2026-01-02T03:04:05"), NOW) == (
        datetime(2026, 1, 2, 3, 4, 5).timestamp()
    )


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Install a command of a scheduler that runs a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def install(name, script):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


def left_s(environment):
    end = allocation_end(environment)
    return None if end is None else round(end - time.time(), -1)


def test_each_scheduler_is_asked_for_its_own_job(command):
    slurm = SLURM.format((datetime.now() + timedelta(seconds=100)).isoformat(timespec="seconds"))
    command("scontrol", f'[ "$*" = "--oneliner show job 7" ] && echo "{slurm}"')
    command("qstat", '[ "$*" = "-f 8.server" ] && echo "    Walltime.Remaining = 200"')
    command("bjobs", '[ "$*" = "-noheader -o time_left 9" ] && echo "0:06 L"')
    command("flux", '[ "$*" = "job timeleft" ] && echo 400')
    assert left_s({"SLURM_JOB_ID": "7"}) == 100
    assert left_s({"PBS_JOBID": "8.server"}) == 200
    assert left_s({"LSB_JOBID": "9", "LSB_JOBINDEX": "0"}) == 300
    command("bjobs", '[ "$4" = "9[3]" ] && echo "0:06 L"')
    assert left_s({"LSB_JOBID": "9", "LSB_JOBINDEX": "3"}) == 300  # an element of an array
    assert left_s({"FLUX_JOB_ID": "f23Q"}) == 400
    assert left_s({"FLUX_JOB_ID": "f23Q", "PBS_JOBID": "8.server"}) == 200  # one in the other
    assert left_s({}) is None


def test_the_environment_of_a_newer_slurm_is_enough(command):
    command("scontrol", "exit 1")
    assert left_s({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 50)}) == 50


@pytest.mark.parametrize("script", ["exit 1", 'echo "EndTime=Unknown Deadline=N/A"', "echo"])
@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("SLURM_JOB_ID", "scontrol"),
        ("PBS_JOBID", "qstat"),
        ("LSB_JOBID", "bjobs"),
        ("FLUX_JOB_ID", "flux"),
    ],
)
def test_without_an_answer_the_end_is_unknown(command, variable, name, script):
    command(name, script)
    assert allocation_end({variable: "7"}) is None


def test_without_the_command_the_end_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert allocation_end({"PBS_JOBID": "7"}) is None


def test_a_command_that_hangs_is_given_up(command, monkeypatch):
    monkeypatch.setattr("mntrain.run.allocation._COMMAND_TIMEOUT_S", 0.2)
    command("qstat", "exec sleep 600")
    assert allocation_end({"PBS_JOBID": "7"}) is None


def test_the_page_for_administrators_has_every_scheduler():
    page = (Path(__file__).parents[3] / "docs" / "administrators.md").read_text()
    for variable, (command, _) in SCHEDULERS.items():
        program = command({variable: "7"})[0]
        [row] = [line for line in page.splitlines() if f"| `{variable}`" in line]
        assert f"`{program} " in row
