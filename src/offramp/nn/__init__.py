"""What several methods are built from: the network they act on, batches, exit heads, exit policies, confidence."""
