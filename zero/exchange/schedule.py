"""Sync schedules: which ranks a step is averaged over, and when groups exchange parameters.

step                            0         1         2         3
SyncSchedule                    world     world     world     world
Exchange, every 2 steps
after 1 of warm-up              world     node      node      node
exchange after it                               yes
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from torch import Tensor

from zero.collectives import Collectives

# The extent of the exchange after a step. After "some", parameters have changed, and may still
# differ between replicas; after "all", replicas hold the same parameters.
Exchanged: TypeAlias = Literal["nothing", "some", "all"]


class SyncSchedule:
    """The groups of ranks that a training step communicates in; by default all ranks in each.

    Gradients, batch weights and buffers of a step are exchanged over `group(step)` alone. State is
    sharded over `sharding` in every step: `group(step)` is the same ranks, or several sharding
    groups together. If no rank of a group has a sample in a step, the group updates nothing.

    Decisions about the job are agreed over all ranks in every step, since one group must not end or
    save while another continues. So a step that is not finite in one group is skipped, or raises,
    on all ranks; and a trainer takes means, signals and save requests over the world. In steps that
    are `independent`, nothing is agreed on.

    Between exchanges, parameters, buffers and optimizer state differ between sharding groups, which
    are called replicas. The tensors below are those that this rank updates, flat slices or whole
    parameters, in fp32 or wider: the same ones on ranks with the same slot in their sharding
    groups. All ranks get the same answers from `group`, `exchange_due` and `after_update`.

    A schedule whose exchanges are due at once defines `exchange_due` and `average` or `exchange`;
    one whose exchanges end in later steps than they start defines `after_update` and `settle`.
    """

    sharding: Collectives
    mode = "every-step"  # its name in reports
    replica = 0  # number of this rank's sharding group
    replicas = 1  # of equal sizes, which together are all ranks
    weighted = False  # whether replicas count in an exchange by the weights of their steps

    def __init__(self, collectives: Collectives) -> None:
        self.sharding = collectives

    def add(self, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Learn of further parameters, by name. Local, on all ranks.

        `sizes` are the elements of each parameter, in the same order on all ranks, and `tensors`
        those that this rank updates, of some or all of them.
        """

    def group(self, step: int) -> Collectives:
        """Return the ranks over which step number `step`, counted from 0, is averaged. Local."""
        return self.sharding

    def independent(self, step: int) -> bool:
        """Return whether replicas take a step without waiting for each other. Local.

        Then each replica skips the step or raises NonFiniteReplicaError by itself, and buffers are
        those of its own.
        """
        return False

    def exchange_due(self, step: int) -> bool:
        """Return whether replicas exchange parameters after a step, also a skipped one. Local."""
        return False

    def before_update(self, step: int, tensors: Sequence[Tensor], *, equal: bool) -> None:
        """Note the parameters before a step changes them. Collective.

        `equal` states that all replicas hold the same.
        """

    def note_weight(self, step: int, weight: float) -> None:
        """Learn what a step's mean over `group(step)` was over, such as its samples. Local.

        Before `after_update`; 0 for a step that is skipped.
        """

    def weights(self) -> list[float]:
        """Return what `weighted` replicas have noted since their last exchange. Local.

        One weight for each part of the parameters that is exchanged by itself. Saved with the
        optimizer's state; the same on all ranks of a replica.
        """
        return []

    def load_weights(self, weights: Sequence[float]) -> None:
        """Restore what `weights` of this or another schedule returned; else count anew. Local."""

    def after_update(self, step: int, tensors: Sequence[Tensor]) -> Exchanged:
        """Start and finish the exchanges that are due after a step, also a skipped one. Collective.

        Changes the parameters in place. By default `exchange`, if `exchange_due`.
        """
        if not self.exchange_due(step):
            return "nothing"
        self.exchange(tensors)
        return "all"

    @property
    def unsettled(self) -> bool:
        """True if `settle` will change parameters. Local, the same on all ranks of the replica."""
        return False

    def settle(self) -> bool:
        """Wait for exchanges in flight, so that `state` contains them. Collective.

        Their results are applied when they are due, or at once: then returns True, on all ranks of
        the replica. Local if nothing is in flight.
        """
        return False

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, in place, by their means over replicas. Collective."""

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Make parameters the same on all replicas, in place. Collective. By default the mean.

        Exchanges in flight are finished before.
        """
        self.average(tensors)

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return what is kept for a parameter, in its shape. Local; call `settle` before.

        The keys begin with `zero.state.SYNC`. It is saved with the optimizer's state. It is the
        same on all replicas, except under the keys in `zero.state.PER_REPLICA`.
        """
        return {}

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, or nothing, for a parameter; drop what is in flight."""

    def nbytes(self) -> int:
        """Return the bytes that were kept, and in flight, on this rank, at the peak. Local."""
        return 0


def check_replicas(schedule: SyncSchedule, collectives: Collectives) -> None:
    """Raise ValueError for a schedule whose replicas together are not all ranks. Local."""
    ranks, replicas, replica = schedule.sharding.size, schedule.replicas, schedule.replica
    if ranks * replicas != collectives.size or not 0 <= replica < replicas:
        raise ValueError(
            f"the sync schedule shards over {ranks} ranks, and this is replica {replica} of "
            f"{replicas}, but there are {collectives.size} ranks: set its replicas to the number "
            "of sharding groups, and replica to that of this rank's, from 0"
        )
