"""Depth-adaptive translation beside CTranslate2 with the same weights: tokens a second and BLEU.

    python benchmarks/papers/translation_peers.py RUN --data test.jsonl --limit 200 --json peers.json

The run's full model is converted to CTranslate2 (`pip install ctranslate2`) in fp32 and in int8. Every contender
translates the same batches greedily, encoder included: ours at full depth, ours at the cheapest operating points that
lost at most half a point and one point in calibration, and CTranslate2 at full depth. All take turns on each batch; the
median of the rounds counts. `agreement` is the share of sentences that equal those of our full model.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks.papers.depth_adaptive import prepare_data, settings_to_time

from offramp import __version__
from offramp.data.readers import read_rows
from offramp.data.tokenization import Encoded
from offramp.decoding.translate import length_limit, translate_packed
from offramp.errors import OfframpError
from offramp.evaluation.result_cells import data_and_split, hardware
from offramp.evaluation.timing import interleaved
from offramp.inference.predictor import Predictor
from offramp.nn.batches import Data, pack_rows
from offramp.utils.command_line import command_line
from offramp.utils.files import write_json

PROGRAM = "python benchmarks/papers/translation_peers.py"
PEERS = {"ctranslate2 fp32": "float32", "ctranslate2 int8": "int8"}
Pieces = list[str]


def ctranslate2_package() -> Any:
    """Return the package, which only this script needs."""
    try:
        import ctranslate2.converters.transformers
    except ImportError as error:
        raise OfframpError("CTranslate2", "it is not installed", "run `pip install ctranslate2`") from error
    return ctranslate2


def convert_run(run: str, folder: Path, precision: str) -> Path:
    """Write the full model of a run as a CTranslate2 model and return its folder.

    The loader of BART is used: that of Marian expects the published models, whose last piece is the padding and whose
    decoders start from zeros.
    """
    with torch.no_grad():
        model: Any = transformers.MarianMTModel.from_pretrained(run)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(run)
        tokenizer.bos_token = tokenizer.eos_token  # the loader states one, and these models have none
        model.config.normalize_before, model.config.normalize_embedding = False, False
        spec = ctranslate2_package().converters.transformers.BartLoader()(model.eval(), tokenizer)
        spec.validate()
        spec.optimize(quantization=precision)
    folder.mkdir(parents=True)
    spec.save(str(folder))
    return folder


class Contenders:
    """Ours and theirs behind one call: a batch of encoded rows → the pieces of its translations, without the end."""

    def __init__(self, predictor: Predictor, run: str, folder: Path, threads: int) -> None:
        self.predictor, self.tokenizer = predictor, predictor.model.tokenizer
        method = predictor.model.method
        chosen = settings_to_time(predictor, (0.005, 0.01))
        self.policies = {
            f"offramp {name}": method.policy(predictor.network, settings) for name, settings in chosen.items()
        }
        self.translators = {
            name: ctranslate2_package().Translator(
                str(convert_run(run, folder / precision, precision)),
                device="cpu",
                compute_type=precision,
                inter_threads=1,
                intra_threads=threads,
            )
            for name, precision in PEERS.items()
        }
        self.names = [*self.policies, *self.translators]

    def translate(self, name: str, rows: Sequence[Encoded]) -> list[Pieces]:
        """Return the pieces of every row."""
        return self._ours(name, rows) if name in self.policies else self._theirs(name, rows)

    def _ours(self, name: str, rows: Sequence[Encoded]) -> list[Pieces]:
        network = self.predictor.network
        packed = pack_rows(network.task, rows).to(network.device)
        with torch.inference_mode():
            hypotheses, _ = translate_packed(network, self.predictor.engine, self.policies[name], packed)
        pieces = [self.tokenizer.convert_ids_to_tokens(one.pieces) for one in hypotheses]
        return [[piece for piece in one if piece != self.tokenizer.eos_token] for one in pieces]

    def _theirs(self, name: str, rows: Sequence[Encoded]) -> list[Pieces]:
        sources = [self.tokenizer.convert_ids_to_tokens(row.ids) for row in rows]
        longest = max(length_limit(len(row.ids), self.predictor.network.encoder.positions) for row in rows)
        found = self.translators[name].translate_batch(
            sources, beam_size=1, max_decoding_length=longest, max_input_length=0
        )
        return [one.hypotheses[0] for one in found]


def measure(contenders: Contenders, data: Data, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return tokens a second of every contender at every batch size, with BLEU and agreement at the largest."""
    order = sorted(range(len(data.encoded)), key=lambda i: len(data.encoded[i].ids))
    quality = {name: _quality(contenders, name, data, max(sizes)) for name in contenders.names}
    full = quality[contenders.names[0]]["texts"]
    found = []
    for size in sizes:
        groups = [[data.encoded[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
        counts = {
            name: sum(len(one) + 1 for group in groups for one in contenders.translate(name, group))
            for name in contenders.names
        }
        seconds = interleaved(contenders.translate, contenders.names, groups, rounds)
        for name in contenders.names:
            about = {"contender": name, "batch_size": size, "tokens": counts[name], "seconds": round(seconds[name], 4)}
            equal = sum(a == b for a, b in zip(quality[name]["texts"], full, strict=True)) / len(full)
            rate = round(counts[name] / seconds[name], 1)
            found.append({**about, "tokens_per_second": rate, "bleu": quality[name]["bleu"], "agreement": equal})
    return found


def _quality(contenders: Contenders, name: str, data: Data, size: int) -> dict[str, Any]:
    """Return the translations of all rows and their BLEU."""
    texts: list[str] = []
    for start in range(0, len(data.encoded), size):
        for pieces in contenders.translate(name, data.encoded[start : start + size]):
            texts.append(str(contenders.tokenizer.convert_tokens_to_string(pieces)).strip())
    predictions: list[Mapping[str, Any]] = [{"text": text} for text in texts]
    bleu = contenders.predictor.task.metrics(data.rows, predictions)["bleu"]
    return {"texts": texts, "bleu": round(bleu, 3)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a run and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--sizes", default="1,16,64", help="sentences in a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        torch.set_num_threads(options.threads)
        rows, predictor = read_rows(options.data, limit=options.limit), Predictor.load(options.run)
        data = prepare_data(predictor, rows, options.data)
        with tempfile.TemporaryDirectory() as folder:
            contenders = Contenders(predictor, options.run, Path(folder), options.threads)
            found = measure(contenders, data, [int(size) for size in options.sizes.split(",")], options.rounds)
    except OfframpError as error:
        sys.exit(str(error))
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json:
        name, split = data_and_split(options.data)
        what = "Translation beside CTranslate2 with the same weights: tokens a second and BLEU by batch size"
        about = {"what": what, "command": command_line(PROGRAM), "data": name, "split": split, "sentences": len(rows)}
        versions = {"version": __version__, "ctranslate2": ctranslate2_package().__version__, "hardware": hardware()}
        date = datetime.date.today().isoformat()
        write_json(options.json, {**about, **versions, "threads": options.threads, "date": date, "rows": found})


if __name__ == "__main__":
    main()
