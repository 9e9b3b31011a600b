"""Old names of parts of `tests.factories`, until no test imports them."""

from __future__ import annotations

from tests.factories import TRANSLATION_LETTERS as LETTERS
from tests.factories import TRANSLATION_SHAPE as SHAPE
from tests.factories import TRANSLATION_SPLITS as SPLITS
from tests.factories import translation_config as configuration
from tests.factories import translation_rows as rows
from tests.factories import translation_run_folder as train

__all__ = ["LETTERS", "SHAPE", "SPLITS", "configuration", "rows", "train"]
