"""One training loop for all tasks: precision, accumulation, checkpoints, torch.distributed."""
