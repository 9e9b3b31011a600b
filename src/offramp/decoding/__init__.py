"""Encoder–decoders: decode loop, beam search, cost, exits, training, translation."""
