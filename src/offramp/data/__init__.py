"""From files to token ids: `read.py` gives rows with our column names, `tokenise.py` turns rows into `Encoded`.

Importing this room imports neither torch nor transformers, so that `offramp --help` stays fast. Nothing is
re-exported: `offramp.data.readers` is always the module, never the function of that name.
"""
