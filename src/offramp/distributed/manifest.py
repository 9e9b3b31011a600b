"""What makes a job resumable: a manifest in the output folder, and a record for every output file that is complete.

    OUTPUT/part-00000.jsonl …            the rows with their predictions, one file a block, in the order of the input
    OUTPUT/_offramp/manifest.json        what the answers depend on, and the blocks
    OUTPUT/_offramp/done/part-….json     rows, errors and cost of an output file; written after the file itself
    OUTPUT/_offramp/tmp/                 files while they are written

A file gets its name in one step when it is complete, and a block always has the same name, so a block that is answered
twice (its actor was killed before the record was written) is still there once. Readers skip names with an underscore.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offramp import __version__
from offramp.distributed.blocks import Block, InputFile, arrow, file_system
from offramp.distributed.shards import ADDED
from offramp.errors import OfframpError

FOLDER = "_offramp"
DESCRIPTIONS = ("README.md", "recipe.yaml")  # files of a run on which no answer depends
POINTS = "points.json"
IN_WORDS = {  # key of the identity → how a message names it
    "model": "another model",
    "points": "other operating points",
    "budget": "another budget",
    "inputs": "other input files",
    "windows": "another way to read long inputs",
    "offramp": "another version of Offramp",
}


def run_fingerprints(run: Path) -> dict[str, str]:
    """Return hashes of all files of a run that answers depend on: its operating points, and everything else."""
    digest = hashlib.sha256()
    for path in sorted(run.iterdir()):
        if path.is_file() and path.name not in (*DESCRIPTIONS, POINTS) and not path.name.startswith("."):
            digest.update(f"{path.name}\n{_file_hash(path)}\n".encode())
    points = run / POINTS
    return {"model": digest.hexdigest(), "points": _file_hash(points) if points.is_file() else ""}


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def check_node(version: str, run: str, fingerprints: Mapping[str, str]) -> None:
    """Refuse a node that has another version of Offramp or another run than the driver."""
    if version != __version__:
        given = f"{__version__} on a node, {version} at the driver"
        raise OfframpError("one version of Offramp on all nodes", given, "install the same version everywhere")
    if not Path(run).is_dir():
        raise OfframpError(f"the run {run} on every node", "a node without it", "put it on a shared file system")
    if run_fingerprints(Path(run)) != dict(fingerprints):
        raise OfframpError(f"the run {run} on every node", "a node with another one", "put it on a shared file system")


class OutputFolder:
    """The output folder of a job, on any file system that pyarrow knows."""

    def __init__(self, place: str | Path, kind: str) -> None:
        self.place, self.kind = str(place), kind
        self.system, self.root = file_system(place)

    def shard(self, number: int) -> str:
        """Return the name of the output file of a block."""
        return f"part-{number:06d}.{self.kind}"

    def read_manifest(self) -> dict[str, Any] | None:
        """Return the manifest, or None if there is none yet; refuse a folder that holds something else."""
        pa, path = arrow(), f"{self.root}/{FOLDER}/manifest.json"
        if self.system.get_file_info(path).type == pa.fs.FileType.File:
            manifest = self._json(path)
            if not isinstance(manifest, dict) or not {"identity", "blocks"} <= manifest.keys():
                fix = "name another --output, or remove the folder to begin anew"
                raise OfframpError(f"to continue the answers in {self.place}", f"a damaged {FOLDER}/manifest.json", fix)
            return manifest
        if self.system.get_file_info(self.root).type == pa.fs.FileType.File:
            raise OfframpError("a folder for the answers", f"{self.place}, which is a file", "name a folder")
        listed = self.system.get_file_info(pa.fs.FileSelector(self.root, allow_not_found=True))
        if any(info.base_name != FOLDER for info in listed):
            raise OfframpError("a new folder for the answers", f"other files in {self.place}", "name another --output")
        return None

    def write_manifest(self, identity: Mapping[str, Any], blocks: list[Block]) -> None:
        """Write what the answers depend on, the blocks, and which columns every output file of them gets."""
        for name in ("done", "tmp"):
            self.system.create_dir(f"{self.root}/{FOLDER}/{name}", recursive=True)
        plain = [{name: value for name, value in asdict(block).items() if name != "base"} for block in blocks]
        content = {"identity": dict(identity), "blocks": plain, "added": ADDED}
        self._write(f"{self.root}/{FOLDER}/manifest.json", json.dumps(content).encode())

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the records of all output files that are complete and still there, by number of block.

        A record that is damaged does not count: its block is answered again.
        """
        pa = arrow()
        present = self._names(pa.fs.FileSelector(self.root, allow_not_found=True))
        done = pa.fs.FileSelector(f"{self.root}/{FOLDER}/done", allow_not_found=True)
        found = (self._json(f"{done.base_dir}/{name}") for name in sorted(self._names(done)))
        records = (one for one in found if isinstance(one, dict) and "number" in one)
        return {one["number"]: one for one in records if self.shard(one["number"]) in present}

    def write_shard(self, number: int, content: bytes, record: Mapping[str, Any]) -> None:
        """Write the output file of a block and then its record, each in one step."""
        self._write(f"{self.root}/{self.shard(number)}", content)
        record = {"number": number, **record}
        self._write(f"{self.root}/{FOLDER}/done/{self.shard(number)}.json", json.dumps(record).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a complete job and remove what killed writers left."""
        self._write(f"{self.root}/{FOLDER}/summary.json", (json.dumps(summary, indent=2) + "\n").encode())
        self.system.delete_dir_contents(f"{self.root}/{FOLDER}/tmp", missing_dir_ok=True)

    def _names(self, selector: Any) -> set[str]:
        return {info.base_name for info in self.system.get_file_info(selector)}

    def _json(self, path: str) -> Any:
        """Return the content of a file, None if it is no JSON: a machine that lost power may leave an empty one."""
        try:
            return json.loads(self._read(path))
        except ValueError:
            return None

    def _read(self, path: str) -> bytes:
        with self.system.open_input_stream(path) as stream:
            content: bytes = stream.read()
        return content

    def _write(self, path: str, content: bytes) -> None:
        """Write a file beside and move it: on a local disk that is atomic, in an object store files appear whole."""
        fresh = f"{self.root}/{FOLDER}/tmp/{uuid.uuid4().hex}"
        self.system.create_dir(f"{self.root}/{FOLDER}/tmp", recursive=True)
        with self.system.open_output_stream(fresh) as stream:
            stream.write(content)
        self.system.move(fresh, path)


def check_same_job(manifest: Mapping[str, Any], identity: Mapping[str, Any], place: str) -> None:
    """Refuse to continue a job whose answers depend on something else than those that are there already."""
    earlier = manifest["identity"]
    plain = json.loads(json.dumps(dict(identity)))
    other = [key for key in plain if earlier.get(key) != plain[key]]
    if other:
        given = "answers there with " + ", ".join(
            IN_WORDS.get(key, f"another {key.replace('_', ' ')}") for key in other
        )
        raise OfframpError(
            f"to continue the answers in {place}", given, "name another --output, or remove the folder to begin anew"
        )


def manifest_blocks(manifest: Mapping[str, Any], files: list[InputFile]) -> list[Block]:
    """Return the blocks of a manifest, with the addresses of the files that they lie in."""
    bases = {file.path: file.base for file in files}
    return [Block(**block, base=bases[block["path"]]) for block in manifest["blocks"]]


def job_identity(run: Path, files: list[InputFile], **choices: Any) -> dict[str, Any]:
    """Return everything that the answers of a job depend on."""
    return {**run_fingerprints(run), "inputs": [[file.path, file.size, file.changed] for file in files], **choices}
