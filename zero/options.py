"""Options of a sharded optimizer."""

from dataclasses import dataclass
from typing import Literal

import torch

from zero.layout import MIB
from zero.precision import check_travel_dtype, is_positive

STAGES = (0, 1, 2)
PARTITIONS = ("auto", "element", "parameter")


@dataclass(frozen=True)
class Options:
    """Options of `ZeroOptimizer`, equal on all ranks.

    - `stage`: 0 shards nothing, 1 the optimizer state, 2 the gradients too.
    - `partition`: "element" makes shards equal to within an element, and may cut parameters;
      "parameter" deals whole ones to ranks. "auto" is "element" for the optimizers of torch that
      work element by element (`zero.trials.BY_ELEMENT`), and "parameter" for all others, and for
      functions that make one: "element" is the caller's word that another one works so.
    - `max_grad_norm`, `norm_type`: the limit to which the gradient's norm is clipped.
    - `non_finite`: "stop" raises for a gradient that is not finite, "skip" updates nothing.
    - `loss_scale`: None, a number, or "dynamic" (`zero.precision.LossScale`), for fp16. Then
      `scale(loss).backward()`, or `backward(loss, weight)`, takes the place of `loss.backward()`.
    - `gather_dtype`: bf16 or fp16, to which updated parameters that are wider are rounded at stages
      1 and 2, so that their all-gather sends fewer bytes; owners keep them as master weights.
    - `bucket_bytes`: maximum size of a bucket; small models get smaller ones.
    - `overlap_forward`: at stages 1 and 2, `step` does not wait for the parameters that other ranks
      update. Each module of the model waits for its own when it is called or read, and so does any
      operation on a kept parameter. While the script keeps other tensors over their memory, such as
      `p.detach()` or a state dict, `step` waits.
    - `check_every`: steps between comparisons of all bits of the weights, which ride in a message
      that a step sends anyway, and come also after 1, 2, 4, 8 and so on; 0: none. Of trained
      parameters, of those of the model that no optimizer trains, and at stage 0 of master weights,
      over the ranks that share the state, and after an exchange over all.

    Raises ValueError for an option that does not exist.
    """

    stage: int = 0
    partition: Literal["auto", "element", "parameter"] = "auto"
    max_grad_norm: float | None = None
    norm_type: float = 2.0
    non_finite: Literal["stop", "skip"] = "stop"
    loss_scale: float | Literal["dynamic"] | None = None
    gather_dtype: torch.dtype | None = None
    bucket_bytes: int = 25 * MIB
    overlap_forward: bool = False
    check_every: int = 100

    def __post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in STAGES:
            known = ", ".join(map(str, STAGES))
            raise ValueError(
                f"ZeRO stage {self.stage!r} does not exist here: choose one of {known}"
            )
        if self.partition not in PARTITIONS:
            known = ", ".join(PARTITIONS)
            raise ValueError(f"partition {self.partition!r} is unknown: choose one of {known}")
        check_travel_dtype("gather_dtype", self.gather_dtype)
        if self.non_finite not in ("stop", "skip"):
            raise ValueError(f"non_finite is {self.non_finite!r}: choose stop or skip")
        check_norm_type(self.norm_type)
        if self.max_grad_norm is not None and not is_positive(self.max_grad_norm):
            found = self.max_grad_norm
            raise ValueError(f"max_grad_norm is {found!r}: give a number above 0, or None")
        if type(self.check_every) is not int or self.check_every < 0:
            raise ValueError(f"check_every is {self.check_every!r}: give a number of steps, or 0")
        if type(self.bucket_bytes) is not int or self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes!r}: give an int above 0")
        if not isinstance(self.overlap_forward, bool):
            raise ValueError(f"overlap_forward is {self.overlap_forward!r}: give True or False")

    @property
    def skips(self) -> bool:
        """True if a step with a gradient that is not finite updates nothing."""
        return self.non_finite == "skip"


def check_norm_type(norm_type: float) -> None:
    """Raise ValueError for the exponent of no norm."""
    if not is_positive(norm_type):
        raise ValueError(f"norm_type is {norm_type!r}: give a number above 0, or math.inf")
