"""Low-level helpers: atomic files, the hardware line, progress, quiet Hugging Face logging."""
