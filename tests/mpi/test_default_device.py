"""Own loops under a default device of torch's, which is no matter of the library's own tensors.

On `meta`, a tensor that names no device of its own has no values at all.
"""

import pytest
import torch
from oracle import SGD, PlainTraining, assert_parity, init, loss_of, mine, modes, net, samples

from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo

pytestmark = pytest.mark.simulated


def train(world, model, optimizer, alone, seeds):
    for seed in seeds:
        batch = samples(12, seed=seed)
        alone.step(loss_of(alone.model, batch))
        share = mine(world, batch)
        with torch.device("meta"):
            loss_of(model, share).backward()
            optimizer.step()
            optimizer.zero_grad()


@modes
def test_an_own_loop_trains_saves_and_restores(mode, folder):
    alone = PlainTraining(net(), SGD, max_norm=0.05)
    value, own = torch.ones(3), torch.device("meta")
    for turn, seeds in enumerate([range(3), range(3, 5)]):
        model = net()
        with own:
            world = init()
            optimizer = world.optimizer(model, SGD, max_grad_norm=0.05, **mode)
            checkpoints = world.checkpoints(folder, model=model, optimizer=optimizer)
            assert checkpoints.restore() == 3 * turn
        train(world, model, optimizer, alone, seeds)
        assert_parity(world, model, alone)
        with own:
            checkpoints.save(seeds[-1] + 1, now=True)
            checkpoints.close()
            state = optimizer.full_state_dict()
            assert world.mean(world.rank) == (world.size - 1) / 2
            assert world.sum([1.0, 2.0]) == [world.size, 2.0 * world.size]
            assert torch.equal(world.sum(value), value.double() * world.size)
            assert world.gather(world.rank) == list(range(world.size))
            world.close()
        for index, parameter in enumerate(alone.model.parameters()):
            expected = alone.optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(state["state"][index]["momentum_buffer"], expected)


@pytest.mark.parametrize("sync", [LocalSGD, DiLoCo, SparseLoCo])
def test_an_exchange_between_nodes_has_the_bits_that_it_has_without(worlds, sync):
    world = worlds(layout=1)

    def trained(default):
        model = net()
        with torch.device(default):
            optimizer = world.optimizer(model, SGD, sync=sync(every=2))
        for seed in range(4):
            share = mine(world, samples(12, seed=seed))
            with torch.device(default):
                loss_of(model, share).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return list(model.parameters())

    assert all(map(torch.equal, trained("cpu"), trained("meta")))
