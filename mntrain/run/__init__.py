"""The machinery around any training loop: run directory, checkpoints, metrics, reasons to stop."""
