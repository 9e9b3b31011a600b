"""Keys under which a method adds modules to a network (`Network.added`), where more than that method reads them.

Run folders store tensors under these keys: a key that changes needs an entry in `offramp.inference.format1`.
"""

from __future__ import annotations

from typing import Final

EXIT_HEADS: Final = "exit_heads"
"""A ModuleDict of exit heads by the layer they follow, as a string: "0" is the exit on the embeddings."""

FINAL_HEAD: Final = "final_head"
"""A head that replaces the model's own head as the last exit."""

EXIT_UNIT: Final = "exit_unit"
"""A learned unit that decides from a row's states after a layer whether its exit can be trusted."""

PREDICTORS: Final = "predictors"
"""A ModuleDict of the method's own predictors, which score tokens or plan depths, by layer as a string."""

TRAINED_LENGTHS: Final = "lengths"
"""The shortest lengths that a model was trained for (`nn/lengths.py`), of methods whose space is a `LengthSpace`."""

HALTING_UNIT: Final = "halting_unit"
"""A learned unit of a decoder that chooses how many blocks each word goes through."""

VOCABULARIES: Final = "vocabularies"
"""A ModuleDict of vocabulary projections of a decoder's exits below the last, by block as a string."""
