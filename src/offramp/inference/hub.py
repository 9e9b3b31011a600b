"""Run folders and models on the Hugging Face hub: names, downloads into its cache, uploads.

`HF_*` variables (token, endpoint, cache, offline mode) are those of `huggingface_hub`. Weights are safetensors only,
and nothing that a repository brings along is executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from offramp.errors import OfframpError
from offramp.inference.model_card import CARD_FOLDER
from offramp.inference.run_folder import read_description
from offramp.utils.command_line import short_path
from offramp.utils.files import read_json
from offramp.utils.run_paths import HUB_NAME, is_hub_name

FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # of a model, its tokenizer and its exits
ABOUT = ("README.md", "recipe.yaml")
OF_THIS_MACHINE = {"latency.json", "search.json"}  # times of this machine, state of a search: not uploaded


def local_folder(source: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a run: the one that is named, where `~` is home, or one that is downloaded from the hub."""
    source = Path(source).expanduser() if str(source).startswith("~") else source
    if revision is not None and Path(source).exists():
        given = f"revision {revision!r} for the folder {source}"
        raise OfframpError("a revision of a run", given, "leave it out, or give a name on the hub")
    if revision is None and not is_hub_name(source):
        return Path(source)
    return download(str(source), revision)


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model on the hub, from the offline cache if it is there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*FILES, *ABOUT]))
    except Exception as error:  # the hub's library raises errors of several kinds, none of which says what to do
        given = f"no folder of that name here, and from the hub: {_first_line(error)}"
        fix = "give a folder, or check the name, the revision, the network and HF_TOKEN"
        raise OfframpError(f"the model {name!r} on the hub", given, fix) from error


def push_to_hub(
    folder: str | Path,
    name: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Upload a model with exits",
    token: str | None = None,
) -> str:
    """Upload a run folder to the Hugging Face hub in one commit and return its address.

        offramp.push_to_hub("runs/attached", "user/name")
        offramp.load("user/name").predict(["a fine film"])

    Only the run's own files are uploaded, never caches or other files that lie there; paths of this machine in recipe
    and description are shortened to their last two parts, and the model card names the repository.

    Args:
        folder: a run folder.
        name: `user/name`; the repository is created if there is none.
        private: whether a new repository is private; the account's own default if left out.
        revision: the branch to commit to.
        message: of the commit.
        token: of the account; the one that `hf auth login` or HF_TOKEN stored if left out.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    path = Path(folder)
    read_description(path)  # refuses what is not a run
    if not HUB_NAME.fullmatch(name):
        raise OfframpError("a name on the hub", repr(name), "write it as user/name")
    operations = [
        CommitOperationAdd(path_in_repo=file, path_or_fileobj=content) for file, content in uploads(path, name).items()
    ]
    try:
        api = HfApi(token=token)
        url = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(name, operations, commit_message=message, revision=revision)
    except Exception as error:  # see `download`
        fix = "check the name, the network, and that HF_TOKEN (or `hf auth login`) may write there"
        raise OfframpError(f"to upload {folder} as {name!r}", _first_line(error), fix) from error
    return str(url)


def uploads(folder: Path, name: str) -> dict[str, str | bytes]:
    """Return what is uploaded of a run: for every file its path, or its content where it differs from the file."""
    files = sorted({file for pattern in (*FILES, *ABOUT) for file in folder.glob(pattern) if file.is_file()})
    found: dict[str, str | bytes] = {file.name: str(file) for file in files if file.name not in OF_THIS_MACHINE}
    description = read_json(folder / "offramp.json")
    found["offramp.json"] = _json({**description, "base_model": short_path(description["base_model"])})
    if "points.json" in found:
        points = read_json(folder / "points.json")
        found["points.json"] = _json({**points, "data": _short(points["data"])})
    if "recipe.yaml" in found:
        recipe = _short(yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8")))
        found["recipe.yaml"] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode("utf-8")
    if "README.md" in found:
        card = (folder / "README.md").read_text(encoding="utf-8").replace(CARD_FOLDER, name)
        found["README.md"] = card.encode("utf-8")
    return found


def _short(entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries with absolute paths among their values shortened to the last two parts."""
    return {key: short_path(value) if isinstance(value, str) else value for key, value in entries.items()}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
