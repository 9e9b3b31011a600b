"""What several methods share: the network they act on, heads, losses, criteria, traces, the training protocol."""
