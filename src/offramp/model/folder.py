"""The model folder: what plain `transformers` opens as the full model and Offramp opens as the adaptive one.

    config.json model.safetensors tokenizer…   the full model, Hugging Face names
    offramp.json offramp.safetensors           method, options, task, versions; added modules
    points.json recipe.yaml README.md          operating points; how it was trained; the model card

JSON and safetensors only: nothing is ever unpickled, no remote code is ever run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import offramp
from offramp import methods, tasks
from offramp.errors import OfframpError
from offramp.methods import Method
from offramp.model.files import read_json, write_json
from offramp.parts.network import Network, network
from offramp.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1


@dataclass(frozen=True)
class Loaded:
    """A model folder in memory."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    method: Method
    options: Any
    max_length: int
    base_model: str
    folder: Path | None = None


def load_backbone(source: str, task: Task) -> PreTrainedModel:
    """A Hugging Face model for a task, from a folder or a hub name: safetensors only, float32, no remote code."""
    auto = getattr(transformers, task.auto_class)
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model: PreTrainedModel = auto.from_pretrained(
            source,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            **task.config(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise OfframpError(
            f"a pretrained model for {task.name}",
            f"{source!r}: {_first_line(error)}",
            "give a folder with config.json and model.safetensors, or the name of a model on the hub",
        ) from error
    finally:
        transformers.logging.set_verbosity(before)
    return model


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model."""
    try:
        made: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise OfframpError(
            "a tokenizer", f"{source!r}: {_first_line(error)}", "put tokenizer.json beside the model's weights"
        ) from error
    return made


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def assemble(hf: PreTrainedModel, task: Task, method: Method, options: Any) -> Network:
    """A network with the method's modules in it."""
    net = network(hf, task)
    method.check(net)
    net.added.update(method.modules(net, options))
    return net


def save(folder: Path, model: Loaded) -> None:
    """Write everything but points, recipe and card. `folder` should be a fresh one that takes its place afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model.network.hf.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        added = {name: t.detach().contiguous().cpu() for name, t in model.network.added.state_dict().items()}
        save_file(added, folder / "offramp.safetensors", metadata={"format": "pt"})
    except OSError as error:
        raise OfframpError(
            f"to write {folder}", f"the system's answer: {error.strerror or error}", "free some disk space"
        ) from error
    write_json(folder / "offramp.json", describe(model))


def describe(model: Loaded) -> dict[str, Any]:
    """What offramp.json holds."""
    task = model.network.task
    return {
        "format": FORMAT,
        "method": model.method.name,
        "options": asdict(model.options),
        "settings": asdict(model.method.settings()),
        "task": {"name": task.name, **task.to_json()},
        "max_length": model.max_length,
        "base_model": model.base_model,
        "versions": {
            "offramp": offramp.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def is_run(folder: Path) -> bool:
    """Whether a folder holds a finished model."""
    return (folder / "offramp.json").is_file()


def about(folder: str | Path) -> dict[str, Any]:
    """offramp.json of a run, or a clear answer why this is not one."""
    path = Path(folder)
    if not is_run(path):
        what = "an existing folder without offramp.json" if path.is_dir() else "no such folder"
        raise OfframpError(
            f"the run folder {str(folder)!r}", what, "give the folder that `offramp train --out` wrote"
        )
    spec: dict[str, Any] = read_json(path / "offramp.json")
    if not isinstance(spec, dict) or spec.get("format") != FORMAT:
        raise OfframpError(
            f"a model folder of format {FORMAT}",
            f"{folder} of format {spec.get('format') if isinstance(spec, dict) else '?'}",
            "load it with the Offramp version that wrote it, or train again",
        )
    return spec


def load(folder: str | Path) -> Loaded:
    """A model folder with all its parts."""
    path, spec = Path(folder), about(folder)
    task_spec: Mapping[str, Any] = spec["task"]
    tokenizer = load_tokenizer(str(path))
    task = tasks.get(task_spec["name"]).from_json(dict(task_spec)).with_tokenizer(tokenizer)
    method = methods.get(spec["method"])
    options = methods.configure(method.options, spec["options"], spec["method"])
    net = assemble(load_backbone(str(path), task), task, method, options)
    try:
        net.added.load_state_dict(load_file(path / "offramp.safetensors"))
    except (OSError, RuntimeError, ValueError) as error:
        raise OfframpError(
            f"the added modules of {folder}", f"a damaged or foreign offramp.safetensors ({_first_line(error)})", "train again"
        ) from error
    net.eval()
    return Loaded(net, tokenizer, method, options, spec["max_length"], spec["base_model"], path)
