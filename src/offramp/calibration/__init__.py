"""Settings for every budget: found on held-out rows, by replay where a method allows it, and scored honestly."""
