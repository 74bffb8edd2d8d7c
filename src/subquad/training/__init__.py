"""One loop for all experiments: precision, accumulation, checkpoints, torch.distributed."""
