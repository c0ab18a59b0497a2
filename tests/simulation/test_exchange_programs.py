"""Random exchanges of random nodes, which train alone for some steps, against one process."""

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_digest import model_digest
from models import net
from network import NetworkModel
from oracle import ADAMW, loss_of, rows, samples, update
from replicas import Means, Rounds, Sparse
from search import searched
from simulated_worlds import SimulatedWorlds
from test_programs import networks
from virtual_time import current

from mntrain.sync import DiLoCo, LocalSGD, SparseLoCo


@dataclass(frozen=True)
class Exchanges:
    """Steps of nodes of `per_node` ranks each, whose parts of a batch are of unequal sizes.

    Ranks compute for unequal times, so with a staleness, nodes are unequal numbers of rounds ahead.
    """

    seed: int
    nodes: int
    per_node: int
    stage: int
    sync: LocalSGD
    steps: int
    slow: tuple[float, ...]  # seconds of a step of the nodes
    network: NetworkModel

    @property
    def cuts(self):
        """Return the bounds of the ranks' parts of a batch."""
        sizes = random.Random(self.seed).choices(range(1, 4), k=self.nodes * self.per_node)
        return [0, *accumulate(sizes)]

    def batch(self, step):
        return samples(self.cuts[-1], seed=step)

    def alone(self, lags):
        """Train replicas in this process; return them by node. `lags` are by step and node."""
        kind = Sparse if isinstance(self.sync, SparseLoCo) else Means
        extra = self.nodes
        if self.sync.max_staleness:
            kind, extra = Rounds, [0] * self.nodes

        class Own(kind):
            def loss(own, model, step, node):  # noqa: N805 - `self` is the program
                every = self.per_node
                first, last = (0, -1) if node is None else (node * every, (node + 1) * every)
                return loss_of(model, rows(self.batch(step), self.cuts[first], self.cuts[last]))

        replicas = Own(net(), self.sync, ADAMW, extra)
        for step in range(self.steps):
            replicas.lags = lags[step]
            replicas.step(step)
        return replicas

    def on_rank(self, world):
        model, rank = net(), world.rank
        optimizer = world.optimizer(
            model,
            torch.optim.AdamW,
            stage=self.stage,
            partition="parameter" if self.stage else "auto",  # a code is of whole parameters
            sync=self.sync,
            lr=0.01,
            weight_decay=0.1,
        )
        low, high = self.cuts[rank : rank + 2]
        lags = []
        for step in range(self.steps):
            node = rank // self.per_node
            current().time.sleep(self.slow[node] * (1 + (rank + step) % 2))
            optimizer.share(high - low)
            update(optimizer, loss_of(model, rows(self.batch(step), low, high)))
            lags.append(len(optimizer.sync_schedule._flying))
        optimizer.wait_for_parameters()
        after = model_digest(model), [p.detach().clone() for p in model.parameters()]
        with optimizer.averaged():
            mean = model_digest(model)
        optimizer.close()
        return (*after, mean, lags)


def exchanges():
    rounds = {"every": st.integers(1, 3), "warmup": st.integers(0, 2)}
    staleness = st.sampled_from([0, 0, 1, 3])
    return st.one_of(
        st.builds(LocalSGD, **rounds, max_staleness=staleness),
        st.builds(DiLoCo, **rounds, max_staleness=staleness),
        st.builds(
            SparseLoCo, **rounds, max_staleness=staleness, density=st.sampled_from([0.1, 1.0])
        ),
    )


programs = st.integers(2, 4).flatmap(
    lambda nodes: st.builds(
        Exchanges,
        seed=st.integers(0, 1 << 32),
        nodes=st.just(nodes),
        per_node=st.integers(1, 2),
        stage=st.integers(0, 2),
        sync=exchanges(),
        steps=st.integers(1, 9),
        slow=st.tuples(*nodes * [st.sampled_from([1e-6, 1e-4, 5e-3])]),
        network=networks,
    )
)


@pytest.mark.thorough
@searched(25)
@given(programs)
def test_every_node_has_the_weights_that_the_formula_gives_it(program):
    worlds = SimulatedWorlds(
        [program.per_node] * program.nodes,
        seed=program.seed,
        network=program.network,
        switches=0.1 * (program.seed % 4),
        options={"bucket_mb": 1e-3},
    )
    found = worlds.run(program.on_rank)
    by_node = [
        found[node * program.per_node :][: program.per_node] for node in range(program.nodes)
    ]
    for ranks in by_node:
        assert len({digest for digest, *_ in ranks}) == 1
        assert len({tuple(lags) for *_, lags in ranks}) == 1
    lags = list(zip(*(ranks[0][-1] for ranks in by_node), strict=True))
    assert max(map(max, lags)) <= program.sync.max_staleness
    replicas = program.alone(lags)
    for model, ranks in zip(replicas.models, by_node, strict=True):
        for own, theirs in zip(ranks[0][1], model.parameters(), strict=True):
            torch.testing.assert_close(own, theirs.detach(), rtol=1e-9, atol=1e-9)
    assert len({mean for *_, mean, _ in found}) == 1
