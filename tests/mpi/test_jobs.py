"""Whole training jobs, several in one launch: on some of its ranks, in parts, and refused."""

import json
import tempfile
from pathlib import Path

import golden
import pytest
from job import SMALL, ckpt, losses, metrics, steps_kept, summary, write_corpus
from launch import TESTS
from mpi4py import MPI
from small_jobs import Silent
from worlds import RANKS, first_ranks, meet, refusal, shared_folder

import mntrain
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.errors import TrainingStoppedError
from mntrain.options.command_line import parse
from mntrain.tasks import Loss
from mntrain.train.entry import exit_code
from mntrain.train.trainer import Trainer

RANK = MPI.COMM_WORLD.rank
EACH = ["--checkpoint.every", "1", "--checkpoint.keep", "9"]


def train(folder, *options, comm=MPI.COMM_WORLD):
    """The exit code of a small job on the ranks of comm, for which the others wait."""
    code = fit(folder, options, comm) if comm is not None else None
    meet()
    return code


def fit(folder, options, comm):
    if comm.rank == 0 and not (folder / "corpus.txt").exists():
        write_corpus(folder)
    comm.Barrier()
    words = ["--data.path", str(folder / "corpus.txt"), "--run.dir", str(folder / "run")]
    words += ["--task", "small_jobs:Silent"]
    config = parse([*words, *SMALL, *options])
    names = "algorithm", "bucket_mb", "ranks_per_node"
    given = {name: getattr(config.comm, name) for name in names}
    with mntrain.init(comm, device=config.device, **given) as world:
        return exit_code(Trainer(world, config).fit())


ALONE = {}


def losses_alone(*options):
    """The losses of the job with these options in one process; the oracle, run once by rank 0."""
    if options not in ALONE:
        found = None
        if RANK == 0:
            with tempfile.TemporaryDirectory() as name:
                assert fit(Path(name), options, MPI.COMM_SELF) == 0
                found = losses(Path(name))
        meet()
        ALONE[options] = MPI.COMM_WORLD.bcast(found)
    return ALONE[options]


@pytest.mark.parametrize(
    ("options", "model"),
    [
        (["--zero.stage", "2", "--comm.ranks-per-node", "2", "--comm.algorithm", "lanes"], []),
        *(
            pytest.param(options, model, marks=pytest.mark.exhaustive)
            for options, model in [
                (["--zero.stage", "2", "--train.micro-batch-size", "10"], []),
                (["--zero.stage", "1", "--comm.algorithm", "flat"], []),
                (["--comm.ranks-per-node", "2", "--comm.algorithm", "leader"], []),
                (
                    ["--zero.stage", "2", "--comm.bucket-mb", ".01", "--comm.ranks-per-node", "1"],
                    [],
                ),
                (["--zero.stage", "2", "--train.recompute"], ["--optim.name", "Muon"]),
            ]
        ),
    ],
)
def test_losses_depend_neither_on_the_ranks_nor_on_the_stage(folder, options, model):
    # 57 training windows in batches of 10: shares differ, and every sixth batch has 7 samples.
    shared = ["--train.batch-size", "10", "--train.steps", "8", *model]
    assert train(folder, *shared, *options, "--train.check-every", "1") == 0
    # Sums in another order: fp32 rounding, grown over eight steps.
    assert losses(folder) == pytest.approx(losses_alone(*shared), rel=2e-5)
    assert [line["samples"] for line in metrics(folder)] == [10, 10, 10, 10, 10, 7, 10, 10]


@pytest.mark.skipif(RANKS != golden.RANKS, reason="the reference run has another number of ranks")
@pytest.mark.parametrize(
    "stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1))]
)
def test_losses_are_those_of_the_reference_run(folder, stage):
    """Compare to the bit where the processor is the same."""
    kept = json.loads(golden.FILE.read_text())
    assert train(folder, *golden.OPTIONS, "--zero.stage", str(stage)) == 0
    same = golden.machine() == kept["machine"]
    expected = kept[str(stage)]
    assert losses(folder) == (expected if same else pytest.approx(expected, rel=1e-4))


@pytest.mark.exhaustive
def test_more_ranks_than_samples(folder):
    options = ["--train.batch-size", "1"]
    assert train(folder, *options, "--train.check-every", "1") == 0
    assert losses(folder) == pytest.approx(losses_alone(*options), rel=2e-5)


@pytest.mark.exhaustive
def test_bf16_follows_fp32(folder):
    assert train(folder, "--train.precision", "bf16") == 0
    assert losses(folder) == pytest.approx(losses_alone(), rel=0.02)
    assert losses(folder) != losses_alone()


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16-pure", "fp16"])
def test_the_model_learns_in_16_bits(folder, precision):
    options = ["--train.precision", precision, "--zero.stage", "2", "--train.steps", "40"]
    assert train(folder, *options, "--train.check-every", "20") == 0
    values = losses(folder)
    assert values[-2] < 0.75 * values[0]
    # Two bytes a parameter, and four for those that a rank owns.
    memory = summary(folder)["memory"]
    owned = memory["parameters"]["most"] * 2 / RANKS
    assert memory["master"]["most"] == pytest.approx(owned, rel=0.02)
    # Only the loss scale, which may begin too large, may have cost some steps.
    lines = metrics(folder)
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert len(skipped) == summary(folder)["skipped_steps"]
    assert not skipped or precision == "fp16"


def test_a_run_goes_on_with_other_ranks_at_another_stage(folder):
    for part, size in enumerate((RANKS, 1, RANKS - 1)):
        stop = str(2 * part + 2)
        with first_ranks(size) as comm:
            train(folder, "--zero.stage", str(2 - part), "--run.stop-after", stop, comm=comm)
    assert losses(folder) == pytest.approx(losses_alone(), rel=2e-5)
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]


OLD = TESTS / "data" / "checkpoint-0.1"
OLD_OPTIONS = [
    *("--task", "lm", "--data.path", str(OLD / "corpus.txt"), "--zero.stage", "2"),
    *("--train.precision", "bf16-pure", "--model.layers", "1", "--model.width", "16"),
    *("--optim.lr", "0.02", "--run.resume", str(OLD / "step-00000003")),
]


def test_a_checkpoint_of_version_0_1_is_sound_and_resumed(folder, capsys):
    with first_ranks(1) as comm:
        assert train(folder, *OLD_OPTIONS, comm=comm) == (0 if comm else None)
    if RANK == 0:
        said = capsys.readouterr()
        assert "(saved by 3 ranks on 1 node)" in said.out
        # A run that began anew has 5.5 and more.
        assert "the version that saved it took samples in another order" in said.err
        code, words, errors = ckpt("verify", OLD / "step-00000003")
        assert (code, errors) == (0, "")
        assert words.replace("\n", "").endswith("step-00000003: sound, 0.1 MB")
    assert [line["step"] for line in metrics(folder)] == [4, 5, 6]
    expected = json.loads((OLD / "losses.json").read_text())[3:]
    assert losses(folder) == pytest.approx(expected, rel=2e-2)
    assert max(losses(folder)) < 5


def test_without_a_run_directory_one_is_made_from_the_date(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert train(folder, "--run.dir", "none") == 0
    [run] = (folder / "runs").iterdir()
    assert (run / "summary.json").exists()


@pytest.fixture(scope="module")
def stopped():
    """A run that has stopped after two of its six steps."""
    with shared_folder() as path:
        assert train(path, *EACH, "--run.stop-after", "2") == 0
        yield path


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--train.batch-size", "9", "--run.seed", "3", "--run.allow-change", "seed"],
            "another run: --train.batch-size was 8, and is 9. Give the same, or --run.allow-change "
            "batch-size, or another --run.dir to begin anew",
        ),
        (["--train.steps", "2"], "is after step 2 of 2: nothing is left to do"),
        (
            ["--optim.options", "amsgrad = true"],
            "has no max_exp_avg_sq in the optimizer's state, which AdamW needs with these "
            "options: give those with which it was saved, or begin another run",
        ),
        (["--run.stop-after", "2"], "is after step 2 already, and steps are counted from the beg"),
        (["--run.resume", "never"], "holds a run already: give another run directory"),
        (["--run.resume", "no/such/run"], "--run.resume no/such/run: there is no checkpoint"),
    ],
)
def test_what_cannot_go_on_is_refused_and_nothing_is_lost(stopped, options, said):
    before = sorted(path for path in stopped.rglob("*"))
    assert said in refusal(train, stopped, *options)
    assert sorted(path for path in stopped.rglob("*")) == before
    assert len(metrics(stopped)) == 2
    assert steps_kept(stopped / "run") == [2, 1]


class BreaksLate(Silent):
    """Breaks in the third forward of the last rank, in the way that a subclass says."""

    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        loss = super().loss(model, batch)
        return self.broken(model, loss) if RANK == RANKS - 1 and self.calls == 3 else loss


class NotANumber(BreaksLate):
    def broken(self, model, loss):
        return Loss(loss.mean * float("nan"), loss.count)


class InfiniteGradient(BreaksLate):
    def broken(self, model, loss):
        endless = next(model.parameters()).sum() * 0
        return Loss(loss.mean + (endless.abs() + 0).sqrt(), loss.count)


class InEvaluation(Silent):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss if model.training else Loss(loss.mean * float("inf"), loss.count)


class NeedsMore(Silent):
    def __init__(self, config):
        if RANK == RANKS - 1:
            raise FileNotFoundError("no /data on this node")
        super().__init__(config)


# One micro-batch on every rank, so that the third forward is that of the third step.
ONE_A_RANK = ["--train.batch-size", str(RANKS), "--train.micro-batch-size", "1"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("NotANumber", f"in step 3, the loss is nan on rank {RANKS - 1}"),
        (
            "InfiniteGradient",
            "in step 3, the gradient's norm is nan: not finite in embedding.weight, on rank "
            f"{RANKS - 1}",
        ),
        ("InEvaluation", "in evaluation, the loss is inf on rank "),
    ],
)
def test_training_that_cannot_go_on_says_why(folder, task, said):
    options = ["--task", f"test_jobs:{task}", "--train.check-every", "1", *ONE_A_RANK]
    options += ["--checkpoint.every", "50"]
    with pytest.raises(TrainingStoppedError) as error:
        train(folder, *options)
    assert said in str(error.value)
    meet()
    assert summary(folder)["status"] == "failed"
    assert said in summary(folder)["error"]


def test_a_step_that_cannot_be_made_is_skipped_if_asked_for(folder, capsys):
    options = ["--optim.non-finite", "skip", "--zero.stage", "2", "--train.check-every", "1"]
    assert train(folder, "--task", "test_jobs:NotANumber", *options, *ONE_A_RANK) == 0
    lines = metrics(folder)
    assert [line["skipped"] for line in lines] == [False, False, True, False, False, False]
    assert lines[2]["loss"] is None
    assert "grad_norm" not in lines[2]
    assert summary(folder)["skipped_steps"] == 1
    said = capsys.readouterr().err
    for warning in (
        f"warning: in step 3, the loss is nan on rank {RANKS - 1}",
        "warning: step 3 was skipped: the gradient's norm is nan",
    ):
        assert said.count(warning) == (1 if RANK == 0 else 0)


RARELY = ["--sync.mode", "local-sgd", "--sync.every", "7"]
EACH_A_NODE = ["--comm.ranks-per-node", "1", *RARELY]
STALE = [*EACH_A_NODE, "--sync.max-staleness", "2", "--balance.mode", "throughput"]
UNSHARED = "ranks of a node share no memory and send each other messages instead"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RARELY, "there is one node, so every step is synchronous"),
        (["--balance.mode", "cadence"], "at stage 2, ranks reduce the gradients of every micro-b"),
        (STALE, "so parts stay equal; give --balance.speed, or 10 or more steps"),
        ([*STALE, "--balance.speed", "0:2"], ""),
        ([*EACH_A_NODE, "--balance.mode", "throughput"], ""),
        (None, f"{UNSHARED}, which is slower (node 0: there is none, today)"),
    ],
)
def test_a_job_is_warned_of_options_without_an_effect(folder, capfd, monkeypatch, options, said):
    if options is None:
        reason = property(lambda collectives: "there is none, today")
        monkeypatch.setattr(WorldCollectives, "no_shared_memory_reason", reason)
    small = ["--train.batch-size", "32", "--train.steps", "1", "--zero.stage", "2"]
    assert train(folder, *small, *(options or [])) == 0
    lines = capfd.readouterr().err.splitlines()
    warnings = [one for one in lines if "warning: " in one and "ranks share the" not in one]
    assert len(warnings) == bool(said and RANK == 0), warnings
    assert all(said in one for one in warnings)


def test_bad_input_is_refused_before_any_work(folder):
    said = refusal(train, folder, "--task", "test_jobs:NeedsMore")
    assert f"rank {RANKS - 1}: no /data on this node" in said
    assert not (folder / "run").exists()
