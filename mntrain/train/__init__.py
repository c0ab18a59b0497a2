"""The training job: trainer, run directory, checkpointing, signals, schedule."""
