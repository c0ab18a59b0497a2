"""torchmetrics and means over all ranks, and predictions in the order of the loader."""

import copy
import math

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchmetrics import MeanMetric, Metric, MetricCollection, MinMaxMetric
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)
from worlds import refusal

import mntrain
from mntrain.errors import TrainingStoppedError
from mntrain.tasks import Max, Mean, Sum
from mntrain.train.step_means import StepMeans
from zero.step_message import StepMessage

pytestmark = [
    pytest.mark.simulated,
    # of the references
    pytest.mark.filterwarnings("ignore:.* computes over the samples that this rank:UserWarning"),
    # of a rank without samples
    pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning"),
]

RANKS, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def scores(n):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(n, 3, generator=generator), torch.arange(n) % 3)


class Lists(Metric):
    """States that are lists without a reduction, of unlike lengths."""

    full_state_update = False

    def __init__(self, **options):
        super().__init__(**options)
        self.add_state("first", default=[], dist_reduce_fx=None)
        self.add_state("second", default=[], dist_reduce_fx=None)

    def update(self, logits, targets):
        self.first += list(logits[:, 0])
        self.second += list(targets)

    def compute(self):
        return torch.stack([sum(self.first), sum(self.second)])


class Elsewhere(MeanMetric):
    """Gathers its state by torch.distributed alone."""

    def _sync_dist(self, *_, **__):
        pass


def of_classes(metric, logits, targets):
    metric.update(logits, targets)


def of_entries(metric, logits, targets):
    metric.update(logits[:, 0])


def collection():
    named = {"p": MulticlassPrecision(3), "f": MulticlassF1Score(3), "a": MulticlassAccuracy(3)}
    return MetricCollection(named)  # of one compute group


METRICS = {
    "auroc": (BinaryAUROC, lambda m, x, y: m.update(x[:, 0].sigmoid(), (y > 0).long())),
    "collection": (collection, of_classes),
    "entries": (CatMetric, of_entries),
    "lists": (Lists, of_classes),
    "sum of two": (lambda: MeanMetric() + MeanMetric() * 2, of_entries),
    "wrapped": (lambda: MinMaxMetric(MulticlassAccuracy(3)), of_classes),
}


def ordered(value):
    """Entries of other ranks come after those of this one."""
    return value.sort().values if isinstance(value, torch.Tensor) and value.ndim else value


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_that_of_one_process_over_all_samples(world, name):
    make, update = METRICS[name]
    data = scores(RANKS + 2)
    loader = DataLoader(data, batch_size=RANKS + 1)  # of the second batch, most ranks have nothing
    alone, ours = make(), world.metric(make())
    copied = [copy.deepcopy(ours)] if name in ("collection", "lists") else []
    for metric in (ours, *copied):
        for _ in range(2):  # the second time after reset
            metric.reset()
            alone.reset()
            with torch.no_grad():
                for batch in world.shard(loader):
                    update(metric, *batch)
                update(alone, *data.tensors)
            expected = alone.compute()
            for _ in range(2):  # a computation leaves the states as they were
                torch.testing.assert_close(ordered(metric.compute()), ordered(expected))
            if RANK == RANKS - 1:
                update(metric, *data.tensors)
            update(alone, *data.tensors)
            torch.testing.assert_close(ordered(metric.compute()), ordered(alone.compute()))


def test_a_rank_without_samples_takes_part(world):
    metric = world.metric(MetricCollection([BinaryAUROC(), MeanMetric()]))
    if RANK == 0:
        metric["BinaryAUROC"].update(torch.tensor([0.1, 0.7, 0.4]), torch.tensor([0, 1, 1]))
        metric["MeanMetric"].update(torch.tensor([1.0, 4.0]))
    value = metric.compute()
    assert (float(value["BinaryAUROC"]), float(value["MeanMetric"])) == (1.0, 2.5)


def test_forward_gives_the_value_of_this_ranks_batch(world):
    metric = world.metric(MeanMetric())
    for value in (RANK + 1.0, 3.0 * RANK):
        assert float(metric(value)) == value
    assert float(metric.compute()) == pytest.approx(
        sum(4 * r + 1 for r in range(RANKS)) / 2 / RANKS
    )
    each = world.metric(MeanMetric(dist_sync_on_step=True))
    assert float(each(float(RANK))) == (RANKS - 1) / 2
    assert float(each.compute()) == (RANKS - 1) / 2


def test_what_cannot_be_gathered_is_refused(world):
    with pytest.raises(ValueError, match="type float: give a torchmetrics Metric"):
        world.metric(1.0)
    with pytest.raises(ValueError, match="Elsewhere gathers its state by torch"):
        world.metric(Elsewhere())


# Predictions in order.


def outputs_of(x):
    return {"logits": x * 2, "more": (x[:, 0], [f"n{int(i)}" for i in x[:, 0]])}


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 1}])
@pytest.mark.parametrize("training", [False, True])
def test_predictions_come_once_each_in_the_order_of_the_loader(world, options, training):
    if options.get("num_workers"):
        options = {**options, "multiprocessing_context": "fork"}
    data = TensorDataset(torch.arange(3.0 * (3 * RANKS + 1)).view(-1, 3))
    loader = DataLoader(data, batch_size=2 * RANKS, **options)  # the last batch: not of all ranks
    shard = world.shard(loader)
    with torch.set_grad_enabled(training):
        parts = [x for (x,) in shard]
        outputs = [outputs_of(x) for x in parts]
        found = world.gather_in_order(outputs)
    rows = found["logits"][:, 0] / 2
    assert sorted(rows.tolist()) == data.tensors[0][:, 0].tolist()
    assert (rows.tolist() == data.tensors[0][:, 0].tolist()) == ("shuffle" not in options)
    assert found["more"][0].tolist() == rows.tolist()
    assert found["more"][1] == [f"n{int(i)}" for i in rows]
    assert len(set(world.gather(tuple(rows.tolist())))) == 1
    if not training:  # which has no stand-ins: the rows of all batches may come as one
        seen = torch.cat(parts or [torch.empty(0, 3)])
        assert torch.equal(world.gather_in_order(seen)[:, 0], rows)
        assert np.array_equal(world.gather_in_order(seen.numpy())[:, 0], rows.numpy())
    shard.epoch = 0
    again = [x for (x,) in shard] if training else parts  # the order of the same pass
    assert torch.equal(torch.cat(again), torch.cat(parts))


def test_an_evaluation_within_an_epoch_is_the_pass_that_counts(world):
    training = world.shard([torch.arange(2.0 * RANKS)] * 3)
    data = torch.arange(RANKS - 1.0)  # the last rank has none
    for batch in training:
        with torch.no_grad():
            outputs = [x for (x,) in world.shard(DataLoader(TensorDataset(data), batch_size=9))]
        assert torch.equal(world.gather_in_order(outputs), data)
        assert len(batch) == 2


class WholeStream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(2.0 * RANKS + 1))


class NumbersOfWorker(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5.0) + 10 * get_worker_info().id)


def test_a_stream_has_an_order_if_all_ranks_read_it(world):
    with torch.no_grad():
        outputs = list(world.shard(DataLoader(WholeStream(), batch_size=RANKS + 1)))
    assert torch.equal(world.gather_in_order(outputs), torch.arange(2.0 * RANKS + 1))
    loader = DataLoader(TensorDataset(torch.arange(3.0)))
    for shard in (world.shard(loader, divided=True), world.shard(DataLoader(NumbersOfWorker()))):
        outputs = list(shard)
        assert "call world.gather" in refusal(world.gather_in_order, outputs)


def test_predictions_that_are_not_of_the_pass_are_refused(world):
    data = TensorDataset(torch.arange(4.0 * RANKS))
    loader = DataLoader(data, batch_size=2 * RANKS)
    outputs = [x for (x,) in world.shard(loader)]
    for wrong, words in (
        (outputs[:1], "a list"),
        ([x[:1] for x in outputs], "a list"),
        (outputs[0], "2 rows"),
    ):
        said = refusal(world.gather_in_order, wrong)
        assert f"the predictions ({words}) are not those of the last pass" in said
        assert "this rank had 4 samples in 2 batches, 0 of them stand-ins" in said
    some = iter(world.shard(loader))
    outputs = [next(some)[0] for _ in range(1 + (RANK == 0))]
    assert "predictions of other batches" in refusal(world.gather_in_order, outputs)
    one = TensorDataset(torch.arange(1.0))
    padded = [x for (x,) in world.shard(DataLoader(one), train=True)]
    assert "1 of them stand-ins" in refusal(world.gather_in_order, torch.cat(padded))


def test_rank_0_of_several_warns_of_metrics_of_its_samples(monkeypatch):
    warning = []

    def warn(guards):
        warning.append(RANK)
        return len(warning) == 2  # the library is imported between the two calls

    monkeypatch.setattr(mntrain.world, "warn_of_local_metrics", warn)
    with mntrain.init(device="cpu") as world:
        for _ in range(3):
            world.shard([torch.ones(2)])
        assert warning == ([0, 0] if RANK == 0 else [])


# Means of a job's steps.


def items(rank, batch):
    """The losses of a rank's micro-batch; some have none."""
    count = (rank + 2 * batch) % 4
    return torch.arange(1, count + 1, dtype=torch.float64) * (rank + 1) + batch


def add(means, batch):
    own = items(RANK, batch)
    marked = own[own > 3]
    means.add(
        len(own),
        {
            "loss": own.mean(),
            "marked": Mean(marked.mean(), len(marked)),
            "total": Sum(own.sum()),
            "largest": Max(own.max() if len(own) else torch.tensor(-1.0)),
        },
    )


def test_a_message_has_sums_and_maxima_of_what_is_known_when_it_is_sent(world):
    message, nan = StepMessage(), math.nan
    known = []
    message.put("flag", 1.0)
    message.put("largest", lambda: known[0], "max")
    message.put("nan", nan if RANK == 0 else 5.0, "max")
    message.put("least", torch.tensor(-math.inf), "max")
    message.put("tensor", lambda: torch.tensor([2.0]))
    known.append(-1.0 - RANK)
    assert not message.sent
    message.send(world.collectives)
    found = message.read()
    assert message.by_rank("largest") == {str(rank): -1.0 - rank for rank in range(RANKS)}
    assert math.isnan(found.pop("nan"))
    assert found == {"flag": RANKS, "largest": -1.0, "least": -math.inf, "tensor": 2.0 * RANKS}


def test_metrics_are_those_of_all_items(world):
    means = StepMeans(RANK)
    for step in range(3):
        batches = range(step, step + 3)
        for batch in batches:
            add(means, batch)
        reduced = means.reduce(world.collectives, "in a step")
        every = torch.cat([items(rank, batch) for rank in range(RANKS) for batch in batches])
        assert reduced.loss == pytest.approx(every.mean().item(), rel=1e-12)
        assert reduced.count == len(every)
        marked = every[every > 3]
        expected = {"largest": every.max().item(), "total": every.sum().item()}
        if len(marked):
            expected["marked"] = marked.mean().item()
        assert reduced.metrics == pytest.approx(expected, rel=1e-12)


def test_a_metric_may_begin_late_and_on_one_rank_only(world):
    means = StepMeans(RANK)
    found = []
    rare = {(1, RANKS - 1): {"rare": Mean(torch.tensor(5.0), 2)}, (3, 0): {"highest": Max(7.0)}}
    for step in range(4):
        means.add(1, {"loss": torch.tensor(2.0), **rare.get((step, RANK), {})})
        found.append(means.reduce(world.collectives, "in a step").metrics)
    assert found == [{}, {"rare": 5.0}, {}, {"highest": 7.0}]


def test_a_metric_that_ranks_reduce_in_two_ways_is_refused_on_all(world):
    means = StepMeans(RANK)
    metric = Sum(1.0) if RANK == RANKS - 1 else Max(1.0)
    means.add(1, {"loss": torch.tensor(2.0), "odd": metric})
    with pytest.raises(TrainingStoppedError, match=r"the metric odd is a .*, and was a "):
        means.reduce(world.collectives, "in step 2")


def test_a_group_without_items_has_no_loss_and_others_name_their_ranks_in_the_world():
    with mntrain.init(device="cpu", ranks_per_node=1) as world:
        means = StepMeans(RANK)
        if RANK == 0:
            means.add(1, {"loss": torch.tensor(math.nan)})
        message = StepMessage()
        means.put(message, (RANK,))
        message.send(world.node_collectives)
        found = means.take(message, world.node_collectives, "in step 1", (RANK,))
        assert math.isnan(found.loss)
        assert found.nonfinite == ("nan on rank 0" if RANK == 0 else "")
        assert found.count == int(RANK == 0)
