"""Starts of commands that stand for launchers: shell scripts, without ranks."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import OPEN_MPI_ENVIRONMENT, mpirun_words
from waiting import until

from mntrain.__main__ import main

# Takes a step in each start, as rank 0 does; $starts counts them.
STEP = 'echo >>starts; starts=$(wc -l <starts); echo 1 >"$MNTRAIN_LAUNCH/step"\n'
LOST = "mntrain: error: rank 1 on n2 is lost: its process has ended without a word"
# Tells of the run directory, and when its summary was changed, as rank 0 does; nothing is recorded.
RUN_NOTE = """changed=$(stat -c %.9Y summary.json 2>/dev/null | tr -d .)
start=$(cat "$MNTRAIN_LAUNCH/start")
echo "[$start, \\"$PWD\\", ${changed:-0}, 0]" >"$MNTRAIN_LAUNCH/run"
"""
# Shorter limits than those of launch.
QUICK = """
import sys
from mntrain.launch import answers, launch_command, relaunch, starts
relaunch.SIGNALLED_S = 1.0
starts._ENDING_S = starts._TERMINATING_S = 0.3
answers.ENOUGH_S, answers.LIMIT_S = 1.0, float(sys.argv.pop(1))
answers._ASK_S = 0.3
sys.exit(launch_command.run(sys.argv[1:]))
"""
# In place of ssh: n2 does not answer.
AGENT = """#!/bin/sh
[ $1 = n2 ] && sleep 1000
shift; exec sh -c "$*"
"""


def write_agent(folder, text=AGENT):
    (folder / "agent").write_text(text)
    (folder / "agent").chmod(0o755)


def launch(folder, script, *options, program="sh", limit_s=5.0, **settings):
    """Start launch on a script, which gets the name of a launcher or another one.

    `limit_s`: for the answers of all hosts.
    """
    path = folder / program
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\n{script}')
    path.chmod(0o755)
    python = ["env", "--default-signal=INT", sys.executable]  # ignored in background jobs
    command = [*python, "-c", QUICK, str(limit_s), *options, "--", str(path)]
    words = [*command, *shlex.split(settings.pop("words", ""))]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(words, cwd=folder, **{"text": True, **pipes, **settings})


def end(process):
    """Return the exit code, stdout and stderr of a launch; its folder is gone, too.

    Without the line on the first step of a later start, which a short one may miss.
    """
    out, err = process.communicate(timeout=250)
    folder = Path(process.args[process.args.index("--") + 1]).parent
    assert not list(folder.glob(".mntrain-launch-*"))
    return process.returncode, out, [line for line in err.splitlines() if " trains; " not in line]


def test_output_and_exit_code_of_the_command_are_passed_on(tmp_path):
    script = 'printf "out\\0 \\351"; printf err >&2; exit 3'
    out, err = (done := launch(tmp_path, script, text=False)).communicate(timeout=250)
    assert (done.returncode, out) == (3, b"out\0 \351")
    assert err == b"err\nmntrain: launch: not started again: exit code 3, and every host answers\n"


def test_after_a_loss_the_command_starts_again_and_nothing_of_the_first_start_is_left(tmp_path):
    script = f"""{STEP}
        [ $starts = 2 ] && {{ echo "left: $(tr -d '\\0' </proc/$(cat left)/cmdline)"; exit 0; }}
        setsid sh -c 'echo $$ >left; trap "" TERM; kill -STOP $$' &
        while [ ! -s left ]; do :; done
        echo '{LOST}' >&2; exit 1"""
    code, out, err = end(launch(tmp_path, script))
    assert (code, out) == (0, "left: \n")
    assert err[0] == LOST
    assert err[1].startswith("mntrain: launch: start 2: rank 1 on n2 is lost: its process has ")
    assert "(says the ranks); looking at hosts took " in err[1]


@pytest.mark.thorough
def test_a_process_with_the_launchs_folder_in_another_variable_goes_on(tmp_path):
    script = f"""{STEP}
        [ $starts = 2 ] && {{ tr "\\0" " " </proc/$(cat other)/cmdline; kill $(cat other); exit; }}
        OTHER="x MNTRAIN_LAUNCH=$MNTRAIN_LAUNCH" env -u MNTRAIN_LAUNCH setsid sleep 100 &
        echo $! >other; sleep 1; echo '{LOST}' >&2; exit 1"""
    code, out, _ = end(launch(tmp_path, script))
    assert (code, out) == (0, "sleep 100 ")


@pytest.mark.parametrize("code", [0, 75])
def test_what_a_run_has_in_the_nodes_memory_is_removed_after_the_last_start(tmp_path, code):
    """Only a start that has ended well removes it: after an error, it may be nowhere else."""
    own, other = tmp_path / "shm" / "a run's", tmp_path / "shm" / "another's"
    for folder in (own, other):
        (folder / "node-0").mkdir(parents=True)
    script = f"""{STEP} printf %s {shlex.quote(str(own))} >"$MNTRAIN_LAUNCH/local"; exit {code}"""
    assert end(launch(tmp_path, script))[0] == code
    assert other.exists()
    assert own.exists() == (code != 0)


@pytest.mark.thorough
def test_how_long_nothing_was_trained_is_told_at_the_first_step(tmp_path):
    step = 'echo 1 >"$MNTRAIN_LAUNCH/step"'
    script = f"""[ -e lost ] || {{ {step}; touch lost; echo '{LOST}'; exit 1; }}
        sleep 0.4; {step}; sleep 1; exit 0"""
    process = launch(tmp_path, script)
    _, err = process.communicate(timeout=250)
    said = re.fullmatch(
        r"mntrain: launch: start 2: .*\nmntrain: launch: start 2 trains; nothing was trained for "
        r"([\d.]+) s\n",
        err,
    )
    assert 0.4 <= float(said[1]) < 60
    assert process.returncode == 0


def test_a_launcher_that_waits_after_the_report_of_a_loss_is_ended(tmp_path):
    script = f"{STEP} [ $starts = 2 ] && exit 0; trap '' TERM; echo '{LOST}'; sleep 1000"
    code, _, err = end(launch(tmp_path, script))
    assert (code, len(err)) == (0, 1)


@pytest.mark.parametrize("step", ["", STEP])
def test_starts_that_are_not_known_to_come_further_end_with_the_reason(tmp_path, step):
    code, out, err = end(launch(tmp_path, f"{step} echo start; echo '{LOST}' >&2; exit 9"))
    assert (code, out) == (9, "start\n" * 3)
    assert "again: none of 3 starts in a row ended well; the last: rank 1 on n2 " in err[-1]


def test_starts_that_come_no_further_than_those_before_end(tmp_path):
    """Their last steps differ from each other."""
    metrics = """echo '{"step": '$(($1 - starts % 2))', "loss": 1}' >metrics.jsonl"""
    script = f"{STEP} {RUN_NOTE} {metrics}; kill -9 $$".replace("$1", "99")
    code, _, err = end(launch(tmp_path, script))
    assert code == 137
    assert (tmp_path / "starts").read_text().count("\n") == 5  # 98, 99, then three
    assert "again: none of 3 starts in a row came beyond step 99; the last: " in err[-1]


def test_a_start_that_takes_more_steps_than_the_one_before_begins_the_count_anew(tmp_path):
    steps = 'echo $((starts < 3 ? starts : 3)) >"$MNTRAIN_LAUNCH/step"'
    code, _, err = end(launch(tmp_path, f"{STEP} {steps}; kill -9 $$"))
    assert code == 137
    assert (tmp_path / "starts").read_text().count("\n") == 6  # 1, 2, 3 steps, then three starts
    assert "again: none of 3 starts in a row ended well; the last: " in err[-1]


@pytest.mark.parametrize("writes", [False, True])
def test_the_summary_of_an_earlier_job_says_nothing_of_this_one(tmp_path, writes):
    (tmp_path / "summary.json").write_text('{"status": "preempted"}')
    wrote = "touch -d @7 summary.json" if writes else ":"
    script = f"{STEP} [ $starts = 2 ] && exit; {RUN_NOTE} {wrote}; echo '{LOST}'; exit 9"
    code, _, err = end(launch(tmp_path, script))
    assert code == (9 if writes else 0)
    assert ("not started again: the run is preempted" in err[-1]) == writes


def test_a_command_that_ends_well_without_a_summary_is_not_started_again(tmp_path):
    """Though a host does not answer."""
    write_agent(tmp_path)
    words = "-launcher-exec ./agent -hosts n1:2,n2:2 -n 4 train.py"
    process = launch(tmp_path, f"{STEP} {RUN_NOTE} exit 0", program="mpirun", words=words)
    assert end(process) == (0, "", [])
    assert (tmp_path / "starts").read_text() == "\n"


@pytest.mark.thorough
def test_a_host_that_is_slow_to_answer_is_no_cause_of_an_end_that_nobody_explains(tmp_path):
    write_agent(tmp_path, AGENT.replace("sleep 1000", "sleep 2"))
    words = "-launcher-exec ./agent -hosts n1:1,n2:1,n3:1 -n 2 train.py"
    code, _, err = end(launch(tmp_path, f"{STEP} exit 1", program="mpirun", words=words))
    assert code == 1
    assert err == ["mntrain: launch: not started again: exit code 1, and every host answers"]


@pytest.mark.parametrize(
    ("report", "code"),
    [("mntrain: rank 1 of 2 on n2 failed:", 1), ("", 2), ("mntrain: error: no space left", 1)],
)
def test_errors_end_with_the_commands_exit_code_and_one_sentence(tmp_path, report, code):
    script = f"{STEP} echo '{report}' >&2; exit {code}"
    returned, _, err = end(launch(tmp_path, script))
    assert (returned, len(err)) == (code, 2)
    assert err[-1].startswith("mntrain: launch: not started again: ")
    assert err[-1].endswith("which is no fault of a machine")
    said = report.removeprefix("mntrain: ").removeprefix("error: ").rstrip(":")
    assert not report or "\n".join(err).count(said) == 1


@pytest.mark.parametrize("name", ["TERM", "USR1", "INT"])
def test_signals_are_passed_on_and_end_without_another_start(tmp_path, name):
    child = "trap 'echo child; exit' INT; touch ready; while :; do sleep 0.05; done"
    (tmp_path / "child").write_text(child)
    waits = "wait;" if name == "INT" else ""
    script = f"""trap '{waits} echo {name}; echo "{LOST}"; exit 75' {name}
        env --default-signal=INT sh child & while :; do sleep 0.05; done"""
    process = launch(tmp_path, script)
    until((tmp_path / "ready").exists, process)
    process.send_signal(getattr(signal, f"SIG{name}"))
    code, out, err = end(process)
    assert (code, err) == (75, [])
    # As a terminal does, launch tells all processes of the command of Ctrl-C.
    told = out.replace(LOST, "").split()
    assert sorted(told) == (["INT", "child"] if name == "INT" else [name])


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["", "mpirun"])
def test_the_command_ends_with_launch_however_that_ends(tmp_path, launcher):
    """And mpirun ends its ranks then."""
    rank = ["sh", "-c", "echo $$ >>children; exec sleep 1000"]
    words = [*mpirun_words(2), *rank] if launcher else rank
    count, environment = (2, {**os.environ, **OPEN_MPI_ENVIRONMENT}) if launcher else (1, None)
    process = launch(tmp_path, f"exec {shlex.join(words)}", env=environment)
    path = tmp_path / "children"
    until(lambda: path.exists() and path.read_text().count("\n") == count, process)
    process.kill()
    children = [Path("/proc", pid) for pid in path.read_text().split()]
    until(lambda: not any(child.exists() for child in children))
    process.communicate()


# By kind: the program that reaches hosts, as it takes its arguments, and the allocation.
PROBES = {
    "ssh": ("ssh", 'while [ "$1" = -o ]; do shift 2; done; host=$1; shift; set -- sh -c "$*"', ""),
    "PBS": (
        "ssh",
        'while [ "$1" = -o ]; do shift 2; done; host=$1; shift; set -- sh -c "$*"',
        "PBS_NODEFILE",
    ),
    "LSF": (
        "blaunch",
        '[ "$1" = -no-shell ] || exit 1; host=$2; shift 2',
        "LSB_DJOB_HOSTFILE",
    ),
    "Flux": (
        "flux",
        """[ "$*" = "hostlist --expand instance" ] && { echo n1 n2 n3; exit; }
        [ "$1 $2" = "exec -n" ] || exit 1; host=n$((${3#--rank=} + 1)); shift 3""",
        "",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind", [k if k == "ssh" else pytest.param(k, marks=pytest.mark.thorough) for k in PROBES]
)
def test_hosts_of_each_kind_are_asked_in_its_way(tmp_path, monkeypatch, kind):
    program, arguments, variable = PROBES[kind]
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / program
    fake.write_text(f'#!/bin/sh\n{arguments}\n[ $host = n2 ] && sleep 1000\nexec "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\nn3\nn3\n")
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "nodes"))
    monkeypatch.setenv({"LSF": "LSB_JOBID", "Flux": "FLUX_URI"}.get(kind, "UNUSED"), "7")
    given = "-hosts n1:2,n2:2,n3:2" if kind == "ssh" else ""
    script = f'{STEP} tail -n 9 "$2"; [ $starts = 2 ] || exit 255'
    words = f"{given} -n 4 train.py"
    code, out, err = end(launch(tmp_path, script, "--spares", "1", program="mpirun", words=words))
    assert code == 0, err
    assert out.split() == ["n1:2", "n2:2", "n1:2", "n3:2"]
    assert err[0].startswith("mntrain: launch: start 2 on n1, n3: no answer from n2; looking at ")


@pytest.mark.thorough
@pytest.mark.parametrize("refuses", [False, True])
def test_a_host_that_is_lost_before_the_first_step_of_a_later_start_is_left_out(tmp_path, refuses):
    """Ranks that have not met yet would notice much later."""
    agent = AGENT.replace("[ $1 = n2 ] &&", "[ $1 = n3 -a -e cut ] &&")
    write_agent(tmp_path, agent.replace("sleep 1000", "exit 255") if refuses else agent)
    hosts = "-launcher-exec ./agent -hosts n1:2,n2:2,n3:2"
    script = f"""case $(wc -l <starts) in
        0) {STEP} echo '{LOST}'; exit 1;;
        1) echo >>starts; touch cut; sleep 1000;;
        *) {STEP} tail -n 9 "$2";;
    esac"""
    (tmp_path / "starts").touch()
    words = f"{hosts} -n 4 train.py"
    code, out, err = end(launch(tmp_path, script, program="mpirun", words=words))
    assert (code, out.splitlines()[1:]) == (0, ["n1:2", "n2:2"])
    assert err[1].startswith(
        "mntrain: launch: start 3 on n1, n2: no answer from n3; before the ranks had met, n3 did "
        "not answer 2 times (says launch); looking at hosts took "
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["slow", "met"])
def test_a_later_start_goes_on_though_a_host_is_slow_to_answer(tmp_path, kind):
    """Or does not answer any more once the ranks have met, as the note of a run directory says."""
    sleep = "sleep 1" if kind == "slow" else "sleep 1000"  # of 2 s that a question may take
    write_agent(tmp_path, AGENT.replace("sleep 1000", f"[ -e begun ] && {sleep}"))
    hosts = "-launcher-exec ./agent -hosts n1:2,n2:2"
    met = RUN_NOTE if kind == "met" else ""
    script = f"""{STEP} [ $starts = 1 ] && {{ echo '{LOST}'; exit 1; }}
        rm $MNTRAIN_LAUNCH/step; {met}
        touch begun; sleep 6; echo well"""
    words = f"{hosts} -n 4 train.py"
    code, out, err = end(launch(tmp_path, script, program="mpirun", words=words, limit_s=2.0))
    assert (code, out.splitlines()[-1], len(err)) == (0, "well", 1)


SILENT = "mntrain: warning: rank 0 on n1 has waited 10 s for rank 1 on n2, which does not answer; "
SILENT += "no rank on n2 answers"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        ("both say so", "n3"),
        ("both say so, and a host that is not in use is lost", "n3"),
        ("both say so, and what has started its processes here is stopped, too", "n3"),
        pytest.param("only the host", "n2", marks=pytest.mark.thorough),
        pytest.param("only the ranks", "n2", marks=pytest.mark.thorough),
        pytest.param("ranks go on", "n2", marks=pytest.mark.thorough),
    ],
)
def test_a_stopped_host_is_lost_if_the_ranks_and_the_host_itself_say_so(tmp_path, kind, hosts):
    """Its processes are stopped, at which the host fails to answer, and ranks wait for it."""
    agent = AGENT.replace("sleep 1000", "[ -e stopped ] && exit 1")
    given = "-launcher-exec ./agent -hosts n1:1,n2:1,n3:1"
    if kind.endswith("is lost"):
        agent, given = agent.replace("shift;", "[ $1 = n4 ] && sleep 1000\nshift;"), f"{given},n4:1"
    write_agent(tmp_path, agent)
    word = "" if kind == "only the host" else f"echo '{SILENT}';"
    stops = ":" if kind == "only the ranks" else "touch stopped"
    steps = 'sleep 0.2; echo 9 >"$MNTRAIN_LAUNCH/step"' * (kind == "ranks go on")
    if kind.endswith("stopped, too"):
        stops = "sleep 1000 & kill -STOP $!; touch stopped"
    script = f"""[ "$1" = -f ] && {{ tail -n 1 "$2"; exit; }}
        sleep 1; {STEP} sleep 1; {word} {stops}; {steps}
        sleep 3; echo n2"""
    code, out, err = end(launch(tmp_path, script, program="mpirun", words=f"{given} -n 2 train.py"))
    assert (code, out.splitlines()[-1].partition(":")[0]) == (0, hosts), err
    assert [line.partition("; looking")[0] for line in err] == (hosts == "n3") * [
        "mntrain: launch: start 2 on n1, n3: no answer from n2; while ranks waited for it, n2 did "
        "not answer 2 times (says launch)"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("answers", [False, True])
def test_a_launcher_that_waits_for_a_lost_host_after_a_signal_is_ended(tmp_path, answers):
    """All that it has started is ended with it; but not while a job ends slowly."""
    lost = ":" if answers else "[ -e cut ] && exit 255"
    write_agent(tmp_path, AGENT.replace("sleep 1000", lost))
    given = "-launcher-exec ./agent -hosts n1:1,n2:1"
    last = "sleep 4; kill -9 $(cat left); exit 7" if answers else ":"
    script = f"""trap 'touch cut; {last}' TERM
        setsid sh -c 'trap "" TERM; echo $$ >left; exec sleep 1000' & sleep 1; {STEP} touch ready
        while :; do sleep 0.1; done"""
    process = launch(tmp_path, script, program="mpirun", words=f"{given} -n 2 train.py")
    until((tmp_path / "ready").exists, process)
    process.terminate()
    code, _, err = end(process)
    assert code == (7 if answers else 75)
    said = [line for line in err if line.startswith("mntrain: ")]  # sh tells of its children
    assert said == (not answers) * [
        "mntrain: launch: ended by force: 1 s after SIGTERM, n2 did not answer 2 times"
    ]
    left = Path("/proc", (tmp_path / "left").read_text().strip(), "cmdline")
    assert answers or not left.exists() or not left.read_bytes()  # or nobody has waited for it


@pytest.mark.thorough
def test_what_the_ranks_say_is_silent_is_not_waited_for_without_a_spare_host(tmp_path):
    write_agent(tmp_path)
    hosts = "-launcher-exec ./agent -hosts n1:2,n2:2"
    how = "the node, or the network to it, does not answer"
    silent = LOST.replace("its process has ended without a word", how)
    script = f'{STEP} echo "$3 $4 $5 $6"; [ $starts = 2 ] && exit; echo "{silent}"; exit 255'
    words = f"{hosts} -n 4 train.py"
    process = launch(tmp_path, script, "--nodes", "1:2", program="mpirun", words=words)
    code, out, err = end(process)
    assert out.splitlines()[-1] == "-launcher-exec ./agent -n 2"  # ranks of one host
    looked = float(re.search(r"looking at hosts took ([\d.]+) s", err[-1])[1])
    assert code == 0
    assert 0.5 < looked < 4  # of 5 that others may take


@pytest.mark.thorough
def test_too_few_hosts_are_left(tmp_path):
    write_agent(tmp_path)
    words = "-launcher-exec ./agent -hosts n1:2,n2:2 -n 4 train.py"
    code, _, err = end(launch(tmp_path, f"{STEP} exit 255", program="mpirun", words=words))
    assert (code, len(err)) == (75, 1)
    assert err[0].startswith(
        "mntrain: launch: not started again: no answer from n2; of 2 hosts, 1 "
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "launch: no command: give one after --"),
        ("--nodes 1 mpirun -n 2 x", "launch: no command: give one after --"),
        ("--spares -1 -- true", "--spares -1: give a number, 0 or more"),
        ("--spares two -- true", "--spares two: give a number, 0 or more"),
        ("--spares 1 -- true", "--spares 1: there is 1 host in all"),
        ("--spares 2 -- mpirun -hosts a,b -n 2 x", "--spares 2: there are 2 hosts in all"),
        ("--nodes 3:2 -- true", "--nodes 3:2: give MIN:MAX, such as 7:8"),
        ("--nodes 7:8 -- mpirun -hosts a,b -n 2 x", "--nodes 7:8: there are 2 hosts to use"),
        ("-- mpirun -f missing -n 2 x", "missing"),
        ("-- mpirun -np 2 true : -np 2 true", "mpirun is to start several programs, separated"),
        ("-- no-such-program", "no-such-program"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *shlex.split(words)]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("mntrain: ")
    assert said in line


def test_launch_needs_neither_torch_nor_mpi():
    program = "import sys, mntrain.launch.launch_command, mntrain.recorder.autopsy\n"
    program += "print({'torch', 'numpy', 'mpi4py'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"set()\n"
