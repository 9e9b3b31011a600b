"""BLEU by sacrebleu, which fixes tokenisation so that scores can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from offramp.errors import need


def corpus_bleu(said: Sequence[str], meant: Sequence[str]) -> float:
    """Corpus BLEU of sentences against one reference each, 0–100 (needs the extra `translation`)."""
    try:
        import sacrebleu
    except ImportError as error:
        raise need("translation", "sacrebleu") from error
    return float(sacrebleu.corpus_bleu(list(said), [list(meant)]).score)
