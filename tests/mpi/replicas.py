"""Nodes that train alone for some steps, as replicas with plain torch in one process."""

import copy

import torch
from oracle import loss_of, samples, update

from mntrain.sync import DiLoCo, SparseLoCo
from zero.comm_hooks.codes import ChunkCode


class Replicas:
    """A replica for each node, trained with plain torch in this process.

    Subclasses `exchange` after a step, of which the first after the warm-up is number 1.
    """

    def __init__(self, model, sync, kind, nodes):
        self.nodes = nodes
        self.models = [copy.deepcopy(model) for _ in range(nodes)]
        self.inner = [kind(model.parameters()) for model in self.models]
        self.sync = sync

    def step(self, step):
        taken = step - self.sync.warmup + 1
        if taken == 1:
            self.begin()
        for node, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            update(inner, self.loss(model, step, node if taken > 0 else None))
        if taken > 0:
            with torch.no_grad():
                self.exchange(taken)

    def loss(self, model, step, node):
        """Return the loss of a node's part of a step's batch; with None, of all of it."""
        batch = samples(12, step)
        if node is not None:
            batch = tuple(column.chunk(self.nodes)[node] for column in batch)
        return loss_of(model, batch)

    def begin(self):
        """Note the parameters before the first step after the warm-up."""
        self.exchanged = [p.detach().clone() for p in self.models[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.exchanged]
        self.left = [[torch.zeros_like(p) for p in self.exchanged] for _ in self.models]

    def mean(self, index):
        """The mean of a parameter over nodes."""
        return sum(list(model.parameters())[index].detach() for model in self.models) / self.nodes

    def send(self, node, index, change, code=None, keeps=1.0):
        """Return what a node sends of a change, and of what it has not sent before."""
        whole = change + keeps * self.left[node][index]
        sent = coded(code, whole) if code else whole
        self.left[node][index] = whole - sent
        return sent

    def after_outer_step(self, index, before, mean):
        """Exchanged parameters after a step by a mean change, of SGD with Nesterov's momentum."""
        factor = getattr(self.sync, "outer_momentum", 0.0)
        self.momentum[index] = factor * self.momentum[index] + mean
        return before - getattr(self.sync, "outer_lr", 1.0) * (mean + factor * self.momentum[index])


class Exchanging(Replicas):
    def exchange(self, taken):
        if taken % self.sync.every == 0:
            self.exchange_now()


class Means(Exchanging):
    """Replicas of local SGD, and of DiLoCo with torch's outer optimizer."""

    def begin(self):
        super().begin()
        if isinstance(self.sync, DiLoCo):
            self.outer = torch.optim.SGD(
                [p.requires_grad_() for p in self.exchanged],
                lr=self.sync.outer_lr,
                momentum=self.sync.outer_momentum,
                nesterov=True,
            )

    @torch.no_grad()
    def exchange_now(self):
        means = [self.mean(index) for index in range(len(self.exchanged))]
        if isinstance(self.sync, DiLoCo):
            for parameter, mean in zip(self.exchanged, means, strict=True):
                parameter.grad = parameter - mean
            self.outer.step()
            means = self.exchanged
        for model in self.models:
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.copy_(mean)


class Sparse(Exchanging):
    def exchange_now(self):
        code = ChunkCode(self.sync.density)
        for index, before in enumerate(self.exchanged):
            own = [list(model.parameters())[index] for model in self.models]
            sent = [self.send(n, index, before - p, code, 0.95) for n, p in enumerate(own)]
            self.exchanged[index] = self.after_outer_step(index, before, sum(sent) / self.nodes)
            for parameter in own:
                parameter.copy_(self.exchanged[index])


class Rounds(Replicas):
    """Nodes by the formula.

    The exchanged parameters G(k) of all rounds are kept. After round r, a node starts from G(k)
    minus its own outer gradients of rounds k + 1 to r, with k = r - its lag.
    """

    def __init__(self, model, sync, kind, lags):
        super().__init__(model, sync, kind, len(lags))
        self.lags = lags

    def begin(self):
        super().begin()
        self.starts = [self.exchanged] * self.nodes
        self.exchanged = [self.exchanged]
        self.settled = 0  # rounds that all nodes have
        self.own = [[] for _ in self.models]  # by node and round

    def exchange(self, taken):
        if taken % self.sync.every == 0:
            self.end_round(self.lags)

    def end_round(self, lags):
        for node, model in enumerate(self.models):
            pairs = zip(self.starts[node], model.parameters(), strict=True)
            self.own[node].append([start - p for start, p in pairs])
        means = [self.mean_of_round(index) for index in range(len(self.momentum))]
        pairs = enumerate(zip(self.exchanged[-1], means, strict=True))
        self.exchanged.append([self.after_outer_step(i, g, mean) for i, (g, mean) in pairs])
        for node, lag in enumerate(lags):
            self.start_round(node, lag)

    def start_round(self, node, lag):
        """Set a node's parameters to what it has after the last round, with a lag."""
        rounds = len(self.own[node])
        has = max(rounds - lag, self.settled)
        own = self.own[node][has:]
        pairs = enumerate(self.exchanged[has])
        self.starts[node] = [g - sum(changes[i] for changes in own) for i, g in pairs]
        for p, start in zip(self.models[node].parameters(), self.starts[node], strict=True):
            p.copy_(start)

    @torch.no_grad()
    def settle(self):
        """Let all that is in flight arrive, within a round or between two."""
        for node, model in enumerate(self.models):
            since = [s - p for s, p in zip(self.starts[node], model.parameters(), strict=True)]
            self.settled = len(self.own[node])
            self.start_round(node, 0)
            for p, change in zip(model.parameters(), since, strict=True):
                p.sub_(change)

    def mean_of_round(self, index):
        code = ChunkCode(self.sync.density) if isinstance(self.sync, SparseLoCo) else None
        changes = [own[-1][index] for own in self.own]
        return (
            sum(self.send(n, index, own, code, 0.95) for n, own in enumerate(changes)) / self.nodes
        )


def coded(code, values):
    """Return what the code of one node's values stands for."""
    left, written = (
        values.flatten().clone(),
        torch.zeros(code.nbytes(values.numel()), dtype=torch.uint8),
    )
    total = torch.zeros_like(left)
    code.encode(left, written)
    code.decode(written, total)
    return total.view(values.shape)
