"""Every command as one typed function; the Python API calls the same functions."""
