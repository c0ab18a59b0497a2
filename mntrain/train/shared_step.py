"""The means of a step that the ranks of a job share.

They travel in the `StepMessage` that ends the reduction of its gradients. Steps that a node takes
alone, between two exchanges (`zero.exchange.exchange`), have the means of the node.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mntrain.errors import TrainingStoppedError
from mntrain.train.job import Job
from mntrain.train.step_means import GlobalMeans, StepMeans
from mntrain.world import World
from zero.comparison import DifferentWeightsError
from zero.exchange.exchange import Exchange
from zero.shard import NonFiniteGradientError
from zero.step_message import StepMessage


@contextmanager
def errors_stop(world: World, step: int) -> Iterator[None]:
    """Raise TrainingStoppedError in place of the block's errors of all ranks: of the optimizer."""
    try:
        yield
    except NonFiniteGradientError as error:
        raise TrainingStoppedError(f"in step {step}, {error}", world.rank) from None
    except DifferentWeightsError as error:
        raise TrainingStoppedError(str(error), world.rank) from None


class SharedStep:
    """The means that the ranks of a job establish together in each step.

    All ranks call `begin` and `before_update`, in this order. Forward adds to `losses`. Unless the
    job's options skip such steps, a loss that is not finite ends it.
    """

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._optimizer = world, job.optimizer
        self._data = job.data
        self.losses = StepMeans(world.rank)
        skips = job.config.optim.non_finite == "skip"
        self._skips = skips or job.precision.loss_scale == "dynamic"
        self._exchange: Exchange | None = None  # of the node, if it takes this step alone
        self.alone = self.meets = False
        """True in a step that the node takes alone, and where it waits for others at its end."""
        self._ranks: Sequence[int] = ()  # of a node that is alone
        self._message = StepMessage()  # of this step
        self._samples = 0.0  # of this step, over the ranks of the means
        self.means: GlobalMeans  # of this step, over all ranks or over the node

    def begin(self) -> None:
        """Begin a step, before its forward passes. Local."""
        optimizer, world = self._optimizer, self._world
        self._exchange = exchange = optimizer.coming_exchange
        self.alone = exchange is not None
        number = optimizer.accumulation.steps
        self.meets = (
            exchange is not None and exchange.exchange_due(number) and not exchange.max_staleness
        )
        self._ranks = world.topology.node_group(world.rank) if self.alone else ()
        self._message = message = optimizer.accumulation.message
        message.put("samples", lambda: float(self._data.sizes[0]))
        self.losses.put(message, self._ranks)

    def before_update(self, step: int) -> None:
        """Wait for the gradients and means. Collective in the ranks of the step.

        Unless such steps are skipped, raises TrainingStoppedError for a loss that is not finite; in
        a step of the node alone, the exchange raises.
        """
        where, world = f"in step {step}", self._world
        self._optimizer.synchronize()
        self._samples = self._message.read()["samples"]
        whole = self._optimizer.group.size == world.size
        group = world.collectives if whole else world.node_collectives
        self.means = self.losses.take(self._message, group, where, self._ranks)
        if self.means.nonfinite and not self._skips:
            reason = f"{where}, the loss is {self.means.nonfinite}"
            if self._exchange is None:
                raise TrainingStoppedError(reason, world.rank)
            self._exchange.refuse(reason)

    def items(self) -> int:
        """Return the items of the step, tokens or samples, over all ranks. Local.

        In a step of the node alone, its own, in proportion to the samples of all nodes.
        """
        if not self.alone:
            return self.means.count
        whole, node = self._data.sizes[1], self._samples
        return round(self.means.count * whole / node) if node else 0
