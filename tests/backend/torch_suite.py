"""Torch's own tests of distributed backends, over backend mntrain and over gloo.

    python tests/backend/torch_suite.py [--ranks 3] [-k WORDS] [--page docs/results/torch-suite.md]

They are those of `torch.testing._internal.distributed.distributed_test`, which pip's torch carries.
A job of mpirun runs them one after the other, each with a process group of its own. Where one fails
or hangs, the job ends, and another one goes on with the next. Exits with 1 if a test fails that
passes over gloo and that `REASONS` does not explain.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter, defaultdict
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path

BACKENDS = ("gloo", "mntrain")
LONGEST_S = 60  # without an end of a test

# Why a test fails here that passes over gloo.
TIMEOUT = "a rank that waits too long ends the job with a report, and does not raise an error"
LATE = "the watchdog names ranks that are late in any call, in place of a barrier that does"
REASONS = {
    "test_barrier_timeout_full_group": TIMEOUT,
    "test_barrier_timeout_global": TIMEOUT,
    "test_monitored_barrier_gloo": LATE,
    "test_monitored_barrier_gloo_subgroup": LATE,
    "test_monitored_barrier_gloo_rank_0_timeout": LATE,
}


class AsGloo(str):
    """The name of a backend, which equals gloo's: the tests ask by it for what is possible."""

    def __eq__(self, other):
        return other == "gloo"

    def __hash__(self):
        return hash("gloo")


def load(backend):
    """The module of torch's tests, for a backend."""
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test as module

    module.BACKEND = AsGloo(backend)
    return module


def case_class(module):
    class TorchCase(module.TestDistBackend, module.DistributedTest._DistTestBase):
        pass

    return TorchCase


def run_tests(backend, folder, names):
    """Run tests on this rank, and write a line for each: its name, outcome and what it says."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    import mntrain.torch_backend  # noqa: F401 - sets RANK, too

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    module = load(backend)
    kind = case_class(module)
    with (folder / f"rank {rank}").open("a") as out:
        for name in names:
            case = kind(name)
            case.rank, case.file_name = rank, str(folder / name)
            seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
            outcome, said = "passed", ""
            try:
                dist.init_process_group(
                    backend,
                    init_method=case.init_method,
                    world_size=int(case.world_size),
                    rank=rank,
                    timeout=timedelta(seconds=seconds),
                )
                case._barrier(timeout=LONGEST_S)
                common_utils.set_rng_seed()
                getattr(case, name)()
            except (unittest.SkipTest, SystemExit) as skip:
                outcome, said = "skipped", str(skip)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                outcome = "failed"
                said = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            print(json.dumps([name, outcome, said]), file=out, flush=True)
            if outcome == "failed":
                time.sleep(3)  # others may find an error, too
                os._exit(1)
            case._barrier(timeout=LONGEST_S)
            if dist.is_initialized():
                dist.destroy_process_group()


def results_of(folder):
    """The outcomes of all ranks by test, and what they say."""
    found = defaultdict(list)
    for file in folder.glob("rank *"):
        for line in file.read_text().splitlines():
            name, *rest = json.loads(line)
            found[name].append(rest)
    return found


def run_suite(backend, ranks, names):
    """The outcome of each test, and what the first rank that failed says."""
    outcomes, left = {}, list(names)
    while left:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            run_job(backend, ranks, folder, left)
            found = results_of(folder)
            output = (folder / "output").read_text()
        for name in left:
            kinds = [kind for kind, _ in found[name]]
            if len(kinds) < ranks or "failed" in kinds:
                said = [text for kind, text in found[name] if kind == "failed"]
                outcomes[name] = "failed", (said or [f"it did not end: {output[-500:]}"])[0]
                break
            outcomes[name] = max(found[name])  # skipped, if any rank did
        left = [name for name in left if name not in outcomes]
    return outcomes


def run_job(backend, ranks, folder, names):
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir()
    command = ["mpirun", "-n", str(ranks), sys.executable, __file__, "--worker", backend, *names]
    environment = {
        **os.environ,
        "TEMP_DIR": str(folder),
        "WORLD_SIZE": str(ranks),
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        while job.poll() is None:
            time.sleep(0.2)
            changed = max(path.stat().st_mtime for path in (folder, *folder.glob("rank *")))
            if time.time() - changed > LONGEST_S:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", nargs="+")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("-k", nargs="+", default=[""], help="words of names")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.worker:
        backend, *names = options.worker
        run_tests(backend, Path(os.environ["TEMP_DIR"]), names)
        return 0
    os.environ.update(WORLD_SIZE=str(options.ranks))
    names = unittest.TestLoader().getTestCaseNames(case_class(load("gloo")))
    names = [name for name in names if any(word in name for word in options.k)]
    found = {backend: run_suite(backend, options.ranks, names) for backend in BACKENDS}
    page, unexplained = page_of(found, options.ranks)
    print(page)
    if options.page:
        options.page.write_text(page)
    print(*(f"no reason: {name}" for name in unexplained), sep="\n")
    return bool(unexplained)


def page_of(found, ranks):
    """The results as a page, and the tests that fail here without a reason."""
    failed = {
        backend: {name: said for name, (kind, said) in outcomes.items() if kind == "failed"}
        for backend, outcomes in found.items()
    }
    worse = [name for name in failed["mntrain"] if name not in failed["gloo"]]
    lines = [
        "# Torch's own tests of process groups",
        "",
        f"`torch.testing._internal.distributed.distributed_test` of torch {version('torch')}, on "
        f"{ranks} ranks of one machine, {date.today()}:",
        "",
        "    python tests/backend/torch_suite.py --page docs/results/torch-suite.md",
        "",
        "| backend | passed | failed | skipped, for GPUs or more ranks |",
        "|---|--:|--:|--:|",
    ]
    for backend, outcomes in found.items():
        counts = Counter(kind for kind, _ in outcomes.values())
        cells = [counts[kind] for kind in ("passed", "failed", "skipped")]
        lines.append(f"| {backend} | {' | '.join(map(str, cells))} |")
    lines += ["", "Fails over mntrain alone:", "", "| test | reason |", "|---|---|"]
    lines += [f"| {name} | {REASONS.get(name, failed['mntrain'][name][:200])} |" for name in worse]
    better = [name for name in failed["gloo"] if name not in failed["mntrain"]]
    lines += ["", "Fails over gloo alone: " + (", ".join(better) or "none") + ".", ""]
    both = [name for name in failed["gloo"] if name in failed["mntrain"]]
    lines += ["Fails over both, which lack what it needs:", "", "| test | error |", "|---|---|"]
    lines += [f"| {name} | {failed['gloo'][name].partition(' (/')[0]} |" for name in both]
    return "\n".join(lines) + "\n", [name for name in worse if name not in REASONS]


if __name__ == "__main__":
    sys.exit(main())
