"""The hook that sums gradients in their own dtype."""

from zero.collectives import Work
from zero.comm_hooks import ReducibleBucket, StatelessHook


class UncompressedHook(StatelessHook):
    """All-reduce or reduce-scatter of a bucket as it is."""

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start the collective."""
        return bucket.reduce()


HOOKS = {"uncompressed": UncompressedHook}
