"""Training that all methods share: stages, objectives, forward passes, losses, the trainer and its checkpoints."""
