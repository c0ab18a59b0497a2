"""The training job: setup, trainer, run directory, checkpointing, signals, summary."""
