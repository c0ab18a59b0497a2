"""Manifests of checkpoints that no job has written."""

from mntrain.checkpoint.format import Manifest


def manifest(**config: object) -> Manifest:
    """The manifest of a run with these options."""
    return Manifest(
        step=2,
        date="2026-01-01T00:00:00+00:00",
        world={"ranks": 1, "nodes": 1},
        config=config,
        samples=0,
        skipped_steps=0,
        eval_loss=None,
    )
