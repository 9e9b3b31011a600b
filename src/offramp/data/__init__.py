"""From files to token ids: `readers` gives rows with our column names, `tokenization` turns texts into `Encoded`.

Importing this room imports neither torch nor transformers, so that `offramp --help` stays fast.
"""
