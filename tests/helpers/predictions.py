"""The memory of an optimizer on any number of ranks, without a world of that size."""

from functools import partial

from zero import memory
from zero.layout import plan_buckets


def predict(
    specs,
    optimizer_class,
    *,
    stage,
    size,
    bucket_bytes,
    slot=0,
    partition="element",
    gather_dtype=None,
    **kwargs,
):
    plan = plan_buckets(specs, bucket_bytes, size, [0] * size if partition == "parameter" else None)
    options = {spec.name: {} for spec in specs}
    make = partial(optimizer_class, **kwargs)
    gather_dtype = gather_dtype if stage else None
    return memory.predict(plan, make, stage, slot, options, gather_dtype=gather_dtype)
