"""Old names of parts of `tests.factories`, until no test imports them."""

from __future__ import annotations

from tests.factories import AUTO_CLASSES as AUTO
from tests.factories import BACKBONES, CONFIGS, SHAPE
from tests.factories import SEQ2SEQ_BACKBONES as SEQ2SEQ
from tests.factories import SEQ2SEQ_SHAPE as SPEAKING
from tests.factories import hf_model as model
from tests.factories import hf_padded as padded
from tests.factories import hf_translation_model as speaker
from tests.factories import token_ids as rows

__all__ = ["AUTO", "BACKBONES", "CONFIGS", "SEQ2SEQ", "SHAPE", "SPEAKING", "model", "padded", "rows", "speaker"]
