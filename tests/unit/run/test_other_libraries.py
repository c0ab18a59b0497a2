"""Models that other trainers have made, and saves without a process group."""

import sys
import warnings
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.first_of_two import FirstOfTwo
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mntrain.errors import ADVICE, advise
from mntrain.run.other_libraries import (
    check_calls,
    check_model,
    gather_states,
    guard_torch_checkpoints,
    lone_accelerator,
    warn_of_local_metrics,
)
from zero.collectives import SingleProcessCollectives
from zero.optimizer import ZeroOptimizer

# Of several workers, one imports the libraries, which takes seconds.
pytestmark = pytest.mark.xdist_group("large libraries")


def sharded_class(name):
    """A class of torch.distributed.fsdp, or that of a layer after fully_shard."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return {
        "FullyShardedDataParallel": FullyShardedDataParallel,
        "Sharded": type("Sharded", (FSDPModule, nn.Linear), {}),
    }[name]


def like(kind):
    """An instance of a wrapper that no process group has made."""
    made = object.__new__(sharded_class(kind) if isinstance(kind, str) else kind)
    nn.Module.__init__(made)
    return made


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (DistributedDataParallel, "is wrapped in DistributedDataParallel: give the module"),
        (DataParallel, "is wrapped in DataParallel: give the module"),
        ("FullyShardedDataParallel", "is sharded by torch.distributed: leave"),
        ("Sharded", "is sharded by torch.distributed: leave"),
    ],
)
def test_what_others_distribute_is_refused_as_a_whole_or_in_part(kind, said):
    with pytest.raises(ValueError, match=f"model {said}"):
        check_model(like(kind), 1)
    with pytest.raises(ValueError, match=rf"model\.1 {said}"):
        check_model(nn.Sequential(nn.Linear(1, 1), like(kind)), 1)
    check_model(nn.Linear(1, 1), 1)


def test_an_accelerator_that_trains_each_rank_alone_is_found(monkeypatch):
    from accelerate.state import AcceleratorState

    assert AcceleratorState._shared_state == {}  # as is expected here
    for shared, processes, size, alone in (
        ({"backend": None}, 1, 2, True),
        ({"backend": None}, 1, 1, False),
        ({"backend": None}, 2, 2, False),  # it has a process group
        ({}, 1, 2, False),  # none was made
    ):
        state = type("State", (), {"_shared_state": shared, "num_processes": processes})
        module = SimpleNamespace(AcceleratorState=state)
        monkeypatch.setitem(sys.modules, "accelerate.state", module)
        assert ("trains each of 2 ranks alone" in lone_accelerator(size)) == alone


def test_an_error_for_want_of_a_process_group_gets_advice_once(monkeypatch):
    monkeypatch.delitem(sys.modules, "mntrain.torch_backend", raising=False)  # of other tests
    with pytest.raises(ValueError, match="process group has not been initialized") as error:
        DistributedDataParallel(nn.Linear(1, 1))
    for _ in range(2):
        advise(error.value)
    assert error.value.__notes__ == [ADVICE]
    other = ValueError("of something else")
    advise(other)
    assert not hasattr(other, "__notes__")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saves_on_other_ranks_are_refused_while_the_world_is_open(tmp_path):
    from torch.distributed.checkpoint import async_save, load, save, state_dict_saver

    state, before = {"x": torch.ones(3)}, state_dict_saver._save_state_dict
    with ExitStack() as guards:
        guard_torch_checkpoints(guards, rank=1)
        with pytest.raises(RuntimeError, match="save on rank 1 as a single process"):
            save(state, checkpoint_id=tmp_path)
        with pytest.raises(RuntimeError, match=r"use world\.checkpoints"):
            async_save(state, checkpoint_id=tmp_path).result()
        assert not list(tmp_path.iterdir())
    assert state_dict_saver._save_state_dict is before
    save(state, checkpoint_id=tmp_path)
    with ExitStack() as guards:
        guard_torch_checkpoints(guards, rank=0)
        save(state, checkpoint_id=tmp_path / "of the master")
        loaded = {"x": torch.zeros(3)}
        load(loaded, checkpoint_id=tmp_path)
    assert loaded["x"].tolist() == [1, 1, 1]


def test_guards_of_worlds_may_end_in_any_order():
    calls, module = [], SimpleNamespace(function=lambda: None)
    first, second = ExitStack(), ExitStack()
    for number, guards in enumerate((first, second), 1):
        check_calls(guards, module, "function", partial(calls.append, number))
    module.function()
    first.close()
    module.function()
    second.close()
    module.function()
    assert calls == [2, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:You are using .torch.load.:FutureWarning")
def test_the_part_of_a_state_that_one_rank_has_is_neither_saved_nor_loaded(tmp_path):
    from torch.distributed.checkpoint import load, save

    def trained(collectives, value):
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, value)
        named = model.named_parameters()
        optimizer = ZeroOptimizer(named, torch.optim.Adam, collectives, stage=1, lr=0.1)
        model(torch.full((1, 3), value)).sum().backward()
        optimizer.step()
        return optimizer

    optimizer = trained(FirstOfTwo(), 1.0)
    words = r"mntrain\.checkpoint\.load .* optimizer\.load_state_dict"
    alone, other = (trained(SingleProcessCollectives(), value) for value in (2.0, 3.0))
    whole = {"optimizer": other.full_state_dict()}
    with ExitStack() as guards:
        guard_torch_checkpoints(guards, rank=0)
        for state in ({"all": [{"optimizer": optimizer.state_dict()}]}, {"optimizer": optimizer}):
            with pytest.raises(RuntimeError, match=rf"cannot save .*{words}"):
                save(state, checkpoint_id=tmp_path)
            with pytest.raises(RuntimeError, match=rf"cannot load .*{words}"):
                load(state, checkpoint_id=tmp_path)
        assert not list(tmp_path.iterdir())
        save({"optimizer": alone.full_state_dict()}, checkpoint_id=tmp_path / "whole")
        load(whole, checkpoint_id=tmp_path / "whole")
    for name, state in alone.full_state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(whole["optimizer"]["state"][name][key], value)


@pytest.mark.thorough
def test_a_metric_of_one_rank_s_samples_is_told_once_for_each_class(monkeypatch):
    from torchmetrics.classification import MulticlassPrecision

    logits, targets = torch.randn(4, 3), torch.arange(4) % 3
    Own, Other = (type(name, (MulticlassPrecision,), {}) for name in ("Own", "Other"))  # noqa: N806

    def warnings_of(metric):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            metric(logits, targets)  # the value of a batch
            metric.compute()
        told = [warning for warning in found if "computes over the samples" in str(warning.message)]
        assert all(warning.filename == __file__ for warning in told)
        return [str(warning.message) for warning in told]

    with ExitStack() as guards:
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torchmetrics.metric")
            assert not warn_of_local_metrics(guards)
        assert warn_of_local_metrics(guards)
        assert not warnings_of(gather_states(Own(3), lambda state: [state]))
        assert not warnings_of(Own(3, sync_on_compute=False))
        (told,) = warnings_of(Own(3)) + warnings_of(Own(3))
        assert told.startswith("Own computes over the samples")
        assert "use world.metric(metric)" in told
        assert len(warnings_of(Other(3))) == 1
    assert not warnings_of(type("Third", (MulticlassPrecision,), {})(3))


def test_states_by_parameter_are_neither_read_nor_set_by_torch():
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

    model = nn.Linear(3, 2)
    optimizer = ZeroOptimizer(model, torch.optim.Adam, SingleProcessCollectives(), lr=0.1)
    words = r"cannot read or set .* use optimizer\.full_state_dict"
    with ExitStack() as guards:
        guard_torch_checkpoints(guards, rank=0)
        with pytest.raises(RuntimeError, match=words):
            get_state_dict(model, optimizer)
        with pytest.raises(RuntimeError, match=words):
            set_optimizer_state_dict(model, optimizer, optimizer.full_state_dict())
    assert not optimizer.state  # torch takes a step where there is none
