"""Measuring, comparing, showing: everything built on top of a trained model."""
