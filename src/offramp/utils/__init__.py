"""Low-level helpers: atomic files, run paths, hardware, progress, Hugging Face logging, merged dataclasses."""
