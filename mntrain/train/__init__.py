"""The training job: setup, trainer, evaluation, summary."""
