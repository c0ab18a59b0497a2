"""The command line of mpirun, srun or flux run: what it says of hosts, and the same for others."""

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mntrain.launch.hosts import Host, merged, of_scheduler, read_hostfile, read_list

_MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun")
_FILES = {"f", "hostfile", "machinefile", "default-hostfile"}
_LISTS = {"hosts", "host", "H"}
_RANKS = {"n", "np", "ntasks"}
# Options with a word of their own after them, without their dashes. Others of that kind are taken
# for such by what follows: a word that is no program.
_ONE = {
    "mpirun": {
        *_FILES,
        *_LISTS,
        *("n", "np", "c", "N", "x", "ppn", "perhost", "rankmap", "wdir", "wd", "configfile"),
        *("genvlist", "envlist", "memory-alloc-kinds", "launcher", "launcher-exec", "bootstrap"),
        *("bootstrap-exec", "rmk", "topolib", "bind-to", "map-by", "rank-by", "membind", "demux"),
        *("errfile-pattern", "outfile-pattern", "prepend-pattern", "iface", "localhost", "usize"),
        *("nameserver", "order-nodes", "gpus-per-proc", "npernode", "npersocket", "prefix"),
        *("rankfile", "rf", "timeout", "tune", "output", "output-filename", "stdin", "with-ft"),
        *("cpu-set", "cpu-list", "display", "runtime-options", "launch-agent", "personality"),
        *("path", "app", "report-uri", "pset", "add-host", "add-hostfile", "dvm"),
    },
    "srun": {
        *("n", "ntasks", "N", "nodes", "c", "cpus-per-task", "p", "partition", "w", "nodelist"),
        *("x", "exclude", "t", "time", "A", "account", "o", "output", "e", "error", "i", "input"),
        *("J", "job-name", "d", "dependency", "D", "chdir", "G", "gpus", "m", "distribution"),
        *("r", "relative", "q", "qos", "M", "clusters", "w", "mem", "mpi", "ntasks-per-node"),
        *("gpus-per-node", "gpus-per-task", "gres", "export", "cpu-bind", "mem-per-cpu", "signal"),
        *("jobid", "constraint", "C", "S", "core-spec", "W", "wait", "reservation", "network"),
        *("container-image", "container-workdir", "container-name", "container-mounts"),
        *("environment", "prolog", "epilog", "task-prolog", "task-epilog", "bcast", "open-mode"),
    },
    "flux": {
        *("n", "ntasks", "N", "nodes", "c", "cores-per-task", "g", "gpus-per-task", "t", "o"),
        *("time-limit", "setopt", "env", "env-file", "requires", "job-name", "output", "error"),
        *("input", "cwd", "q", "queue", "B", "bank", "tasks-per-node", "label-io", "urgency"),
    },
}
# Hostfiles that are not given on the command line: Kubeflow's MPI operator sets these.
_FILE_VARIABLES = (
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"),
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
)
_TWO = {"genv", "env", "mca", "prtemca", "pmixmca", "gmca", "gprtemca", "gpmixmca"}
_OPEN_MPI_AGENTS = ("plm_ssh_agent", "plm_rsh_agent")
_AGENT_VARIABLES = (
    "HYDRA_LAUNCHER_EXEC",
    *(f"{kind}_MCA_{name}" for kind in ("PRTE", "OMPI") for name in _OPEN_MPI_AGENTS),
)


@dataclass(frozen=True)
class Option:
    """An option of the launcher: its name without dashes, its values, and its place in the words.

    A value that stands in the same word, as in --ntasks=4 or -n4, has the text before it as `head`.
    """

    name: str
    values: tuple[str, ...]
    at: int
    head: str = ""

    @property
    def value(self) -> str:
        """The last value, "" if there is none."""
        return self.values[-1] if self.values else ""


class LauncherCommand:
    """A command that starts ranks, and what it says of them.

    `kind` is "mpirun", "srun" or "flux", or "" for another program, which is never changed.
    `hosts` are those that it may use, in order; none if it uses this host, or nobody says which.
    `ranks` is their number, None if it is not said. Raises ValueError for several programs in one
    command, for a hostfile that cannot be read, and for what is no host.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.words, self.environment = words, environment
        self.kind, self.hosts = "", list[Host]()
        program = os.path.basename(words[0])
        if program in _MPIRUN:
            self.kind, self._begin = "mpirun", 1
        elif program == "srun":
            self.kind, self._begin = "srun", 1
        elif program == "flux" and self.words[1:2] == ["run"]:
            self.kind, self._begin = "flux", 2
        self.options: list[Option] = []
        if not self.kind:
            return
        if ":" in self.words and self.kind != "flux":
            raise ValueError(
                f"launch: {program} is to start several programs, separated by ':', whose hosts "
                f"launch cannot choose: give it one program, or a script in which {program} stands"
            )
        self.options = self._read_options()
        self._given = [one for one in self.options if one.name in _FILES | _LISTS]
        files = [self.environment[name] for name in _FILE_VARIABLES if name in self.environment]
        if self.kind == "mpirun" and files and not self._given:
            self.hosts = merged(read_hostfile(Path(files[0]).read_text()))
        elif self.kind != "mpirun" or not self._given:
            self.hosts = of_scheduler(self.environment)
            if asked := self._value("w", "nodelist") if self.kind == "srun" else "":
                names = of_scheduler({"SLURM_JOB_NODELIST": asked})
                self.hosts = [host for host in self.hosts if host in names] or names
        else:
            self.hosts = merged(host for one in self._given for host in self._read(one))

    def _read_options(self) -> list[Option]:
        """Return the options before the program, and note where it stands."""
        ones, found, at = _ONE[self.kind], [], self._begin
        while at < len(self.words):
            word = self.words[at]
            bare = word.lstrip("-")
            if word == bare:
                break
            name, equals, value = bare.partition("=")
            short = re.fullmatch(r"([nNcwxptJ])(.+)", bare) if self.kind != "mpirun" else None
            if equals:
                found.append(Option(name, (value,), at, word[: -len(value) or None]))
                at += 1
            elif short and word.startswith("-" + bare):
                found.append(Option(short[1], (short[2],), at, "-" + short[1]))
                at += 1
            else:
                count = 2 if self.kind == "mpirun" and name in _TWO else int(name in ones)
                if not count and at + 1 < len(self.words):
                    after = self.words[at + 1]
                    program = shutil.which(after) or shutil.which(os.path.join(".", after))
                    is_value = not (after.startswith("-") or program)
                    count = int(is_value and at + 2 < len(self.words))
                found.append(Option(name, tuple(self.words[at + 1 : at + 1 + count]), at))
                at += 1 + count
        self._program = at
        return found

    def _read(self, option: Option) -> list[Host]:
        """Return the hosts that an option of mpirun names. Raises ValueError."""
        given = " ".join(self.words[option.at : option.at + 1 + (not option.head)])
        try:
            if option.name in _LISTS:
                return read_list(option.value)
            return read_hostfile(Path(option.value).read_text())
        except ValueError as error:
            raise ValueError(f"launch: {given}: {error}") from error
        except OSError as error:
            raise ValueError(
                f"launch: the hostfile {option.value} cannot be read ({error.strerror}): give the "
                "path of one that this host sees"
            ) from error

    def _value(self, *names: str) -> str:
        """Return the value of the last of some options, "" if there is none."""
        found = [one.value for one in self.options if one.name in names and one.values]
        return found[-1] if found else ""

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if it is not said."""
        said = self._value(*_RANKS)
        if self.kind == "srun" and not said:
            nodes, each = self.nodes, self._per_node()
            if nodes and each:
                return nodes * each
            said = self.environment.get("SLURM_NTASKS", "")
        return int(said) if said.isdigit() else None

    @property
    def nodes(self) -> int | None:
        """The number of nodes that srun or flux is told to use; None if it is not said."""
        if self.kind not in ("srun", "flux"):
            return None
        said = self._value("N", "nodes") or self.environment.get("SLURM_JOB_NUM_NODES", "")
        return int(said.partition("-")[2] or said) if re.fullmatch(r"\d+(-\d+)?", said) else None

    def _per_node(self) -> int | None:
        said = self._value("ntasks-per-node", "tasks-per-node", "ppn", "perhost", "npernode")
        if not said and self.kind == "srun" and not self._value(*_RANKS):
            said = self.environment.get("SLURM_NTASKS_PER_NODE", "")
        return int(said) if said.isdigit() else None

    def needed(self) -> int:
        """Return how many of the hosts the command needs, in their order."""
        if self.nodes is not None:
            return min(self.nodes, len(self.hosts)) or 1
        room = 0
        for number, host in enumerate(self.hosts, 1):
            room += self._per_node() or host.slots or 0
            if self.ranks and room >= self.ranks:
                return number
        return len(self.hosts) or 1

    @property
    def agent(self) -> str:
        """The program that mpirun starts in place of ssh, "" if none is named."""
        for one in self.options if self.kind == "mpirun" else ():
            if one.name in ("launcher-exec", "bootstrap-exec"):
                return one.values[0]
            if len(one.values) == 2 and one.values[0] in _OPEN_MPI_AGENTS:
                return one.values[1]
        return next(filter(None, map(self.environment.get, _AGENT_VARIABLES)), "")

    def on(
        self, hosts: Sequence[Host], full: int, *, open_mpi: bool, write: Callable[[str], Path]
    ) -> list[str]:
        """Return the command on some hosts; with fewer ranks if these are fewer than `full`.

        `write` makes a file of a text and returns its path. `open_mpi` says whose mpirun it is.
        """
        ranks, words = self.ranks_on(hosts, full), list(self.words)
        names = ",".join(host.name for host in hosts)
        if self.kind != "mpirun":
            place = f"--nodelist={names}" if self.kind == "srun" else f"--requires=host:{names}"
            added = [f"--nodes={len(hosts)}", place, *([f"--ntasks={ranks}"] if ranks else [])]
            return [*words[: self._program], *added, *words[self._program :]]
        for one in self.options:
            if ranks and one.name in _RANKS:
                words[one.at + (not one.head)] = f"{one.head}{ranks}"
        cut = {at for one in self._given for at in range(one.at, one.at + 2 - bool(one.head))}
        kept = [word for at, word in enumerate(words) if at not in cut]
        listed = any(one.name in _LISTS for one in self._given)
        each = math.ceil(ranks / len(hosts)) if ranks and not self._given else None
        each = 1 if listed and open_mpi else each
        lines = [
            host.entry
            if host.entry and not listed
            else _line(host.name, host.slots or each, open_mpi)
            for host in hosts
        ]
        option = "--hostfile" if open_mpi else "-f"
        return [kept[0], option, str(write("\n".join(lines) + "\n")), *kept[1:]]

    def ranks_on(self, hosts: Sequence[Host], full: int) -> int | None:
        """Return the number of ranks on some hosts: as given, or fewer; None if it is not said."""
        if (ranks := self.ranks) is None:
            return None
        per_node = self._per_node()
        room = [per_node or host.slots for host in hosts]
        all_room = [per_node or host.slots for host in self.hosts]
        if all(all_room) and ranks <= sum(filter(None, all_room)):
            return min(ranks, sum(filter(None, room)))
        return ranks if len(hosts) >= full else max(1, ranks * len(hosts) // full)


def _line(name: str, slots: int | None, open_mpi: bool) -> str:
    """Return a line of a hostfile."""
    if slots is None:
        return name
    return f"{name} slots={slots}" if open_mpi else f"{name}:{slots}"
