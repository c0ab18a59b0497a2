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
    resources_used.walltime = 10:45:13
    ctime = Fri Apr 12 15:21:55 2013
    Error_Path = mycluster.cluster:/scratch/user/train/starting-from
\t-left/production/train.job.e74164
    Resource_List.walltime = {}
    stime = Mon Apr 22 07:17:36 2013
    Variable_List = PBS_O_SYSTEM=Linux,PBS_O_SHELL=/bin/bash,
\tstime = a value of the user's
    comment = Job run at Mon Apr 22 at 07:17 on (b270:ncpus=16)+(b275:ncpus=16)

    etime = Mon Apr 22 07:17:34 2013
"""

TORQUE = """Job Id: 8841233.qmaster
    resources_used.walltime = 00:02:10
    Resource_List.walltime = 04:00:00
    etime = Tue Aug 14 17:18:10 2018
    start_time = Tue Aug 14 17:18:16 2018
    Walltime.Remaining = 14266
"""

SLURM = "JobId=7 JobName=a StartTime=2026-01-01T00:00:00 EndTime={} Deadline=N/A"


PBS_START = datetime(2013, 4, 22, 7, 17, 36).timestamp()


@pytest.mark.parametrize(
    ("parse", "output", "end"),
    [
        (parse_pbs, PBS_PRO.format("24:00:00"), PBS_START + 86400),
        (parse_pbs, PBS_PRO.format("00:30:05"), PBS_START + 1805),
        (parse_pbs, PBS_PRO.format("2:00:00:00"), PBS_START + 172800),
        (parse_pbs, PBS_PRO.format("3600"), PBS_START + 3600),
        (parse_pbs, PBS_PRO.replace("    Resource_List.walltime = {}\n", ""), None),
        (parse_pbs, TORQUE, NOW + 14266),
        (
            parse_pbs,  # an older Torque
            TORQUE.replace("    Walltime.Remaining = 14266\n", ""),
            datetime(2018, 8, 14, 21, 18, 16).timestamp(),
        ),
        # Of LSF's minutes, the last may not be whole, and an estimate is no limit.
        (parse_lsf, "0:12 L\n", NOW + 660),
        (parse_lsf, "167:00 L", NOW + 601140),
        *((parse_lsf, output, NOW) for output in ("0:01 L", "0:00 L")),
        *((parse_lsf, none, None) for none in ("-\n", "0:12 E", "0:00 X", "", "Job <7> is not")),
        (parse_flux, "3599\n", NOW + 3599),
        (parse_flux, "0\n", NOW),
        *((parse_flux, none, None) for none in ("4294967295\n", "1e18", "inf")),
        (
            parse_slurm,
            SLURM.format("2026-01-02T03:04:05"),
            datetime(2026, 1, 2, 3, 4, 5).timestamp(),
        ),
    ],
)
def test_the_output_of_a_scheduler_has_the_end(parse, output, end):
    assert parse(output, NOW) == end


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


@pytest.mark.parametrize(
    "script", ["exit 1", 'echo "EndTime=Unknown Deadline=N/A"', "echo", "exec sleep 600"]
)
def test_without_an_answer_or_the_command_the_end_is_unknown(command, script, monkeypatch):
    limit_s = 0.2 if "sleep" in script else 9
    monkeypatch.setattr("mntrain.run.allocation._COMMAND_TIMEOUT_S", limit_s)
    names = {"SLURM_JOB_ID": "scontrol", "PBS_JOBID": "qstat", "LSB_JOBID": "bjobs"}
    for variable, name in {**names, "FLUX_JOB_ID": "flux"}.items():
        command(name, script)
        assert allocation_end({variable: "7"}) is None
    newer = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 50)}
    assert left_s(newer) == 50
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert allocation_end({"PBS_JOBID": "7"}) is None


def test_the_page_for_administrators_has_every_scheduler():
    page = (Path(__file__).parents[3] / "docs" / "administrators.md").read_text()
    for variable, (command, _) in SCHEDULERS.items():
        program = command.split()[0]
        [row] = [line for line in page.splitlines() if f"| `{variable}`" in line]
        assert f"`{program} " in row
