"""The model folder: what plain `transformers` opens as the full model and Offramp opens as the adaptive one.

    config.json model.safetensors tokenizer…   the full model, Hugging Face names
    offramp.json offramp.safetensors           method, options, task, versions; added modules
    points.json recipe.yaml README.md          operating points; how it was trained; the model card

JSON and safetensors only: nothing is ever unpickled, no remote code is ever run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from offramp import __version__, backbones, methods, tasks
from offramp.errors import OfframpError
from offramp.inference import format1
from offramp.methods import Method
from offramp.nn.network import Network, bare_network
from offramp.tasks import Task
from offramp.utils.files import read_json, write_json
from offramp.utils.hf_logging import quiet_transformers
from offramp.utils.run_paths import is_run, working_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 2  # what this version writes; it also reads format 1 (inference/format1.py)


@dataclass(frozen=True)
class LoadedRun:
    """A model folder in memory."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    method: Method
    options: Any
    max_length: int
    base_model: str
    folder: Path | None = None


def check_backbone(source: str) -> None:
    """A model (folder or hub name) of a family that has a backbone file; costs one small file."""
    if not Path(source).is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise _no_model(source, FileNotFoundError("no such folder"))
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as error:
        raise _no_model(source, error) from error
    backbones.find(config.get("model_type", "unknown"))


def load_backbone(source: str, task: Task, whole: bool = False) -> PreTrainedModel:
    """A Hugging Face model for a task, from a folder or a hub name: safetensors only, float32, no remote code."""
    return load_backbone_and_missing(source, task, whole)[0]


def load_backbone_and_missing(source: str, task: Task, whole: bool = False) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model, and the names of parameters that its file lacks.

    A pretrained model lacks the task's head (and perhaps a pooler), which start fresh; of a finished one (`whole`)
    nothing may be missing.
    """
    auto = getattr(transformers, task.auto_class)
    safe = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            model, report = auto.from_pretrained(
                source, **safe, ignore_mismatched_sizes=True, output_loading_info=True, **task.config()
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _no_model(source, error, whole) from error
    wrong = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if whole and wrong:
        given = f"{source}, whose model.safetensors lacks {', '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}"
        raise OfframpError("the whole of a trained model", given, "restore the folder or train again")
    return model, frozenset(wrong)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model."""
    try:
        with quiet_transformers():
            made: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the Rust library raises bare Exceptions; whatever it is, the files are unusable
        raise OfframpError(
            "a tokenizer", f"{source!r}: {_first_line(error)}", "put tokenizer.json beside the model's weights"
        ) from error
    return made


def check_tokenizer_size(tokenizer: PreTrainedTokenizerBase, hf: PreTrainedModel, source: str) -> None:
    """Refuse a tokenizer that knows a fraction of the model's words: without its file an empty one is made."""
    known, wanted = len(tokenizer), int(hf.config.vocab_size)
    if 2 * known < wanted:
        given = f"{source}, whose tokenizer knows {known} pieces where the model has {wanted}"
        raise OfframpError("the tokenizer of a model", given, "put its tokenizer.json beside the model's weights")


def _no_model(source: str, error: Exception, whole: bool = False) -> OfframpError:
    if whole:
        return OfframpError(f"the trained model in {source}", _first_line(error), "restore the folder or train again")
    fix = "give a folder with config.json and model.safetensors, or the name of a model on the hub"
    return OfframpError("a pretrained model", f"{source!r}: {_first_line(error)}", fix)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def build_network(
    hf: PreTrainedModel, task: Task, method: Method, options: Any, fresh: frozenset[str] = frozenset()
) -> Network:
    """A network with the method's modules in it; `fresh` names parameters of `hf` that were never trained."""
    net = replace(bare_network(hf, task), newly_initialized=fresh)
    methods.check_serves(method, task)
    for name, module in method.modules(net, options).items():
        net.added[name] = module
    return net


FRESH = ("exit_heads.", "lengths.", "retention.")  # added modules that begin anew in every run


def reuse_added_modules(net: Network, method: Method, source: str) -> None:
    """What an earlier run of the same method, now a pretrained model, learned besides answering: a predictor of depths
    that was pretrained with its backbone goes on learning. Off-ramps belong to a task and start fresh, and lengths are
    what the options of this run say."""
    path = Path(source)
    if not is_run(path) or read_description(path)["method"] != method.name:
        return
    own = {name: t.shape for name, t in net.added.state_dict().items() if not name.startswith(FRESH)}
    try:
        stored = format1.tensors(load_file(path / "offramp.safetensors"))
    except (OSError, SafetensorError) as error:
        raise _no_added(path, error) from error
    net.added.load_state_dict({name: t for name, t in stored.items() if own.get(name) == t.shape}, strict=False)


def _no_added(path: Path, error: Exception) -> OfframpError:
    given = f"a damaged or foreign offramp.safetensors ({_first_line(error)})"
    return OfframpError(f"the added modules of {path}", given, "restore it or train again")


def save_run(folder: Path, model: LoadedRun) -> None:
    """Write everything but points, recipe and card. `folder` should be a fresh one that takes its place afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.network.hf.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    added = {name: t.detach().contiguous().cpu() for name, t in model.network.added.state_dict().items()}
    save_file(added, folder / "offramp.safetensors", metadata={"format": "pt"})
    write_json(folder / "offramp.json", run_description(model))


def run_description(model: LoadedRun) -> dict[str, Any]:
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
        "layers": model.method.about(model.network),
        "versions": {"offramp": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def read_description(folder: str | Path) -> dict[str, Any]:
    """offramp.json of a run, or a clear answer why this is not one."""
    path = Path(folder)
    if not is_run(path):
        what, fix = "no such folder", "give the folder that `offramp train --out` wrote"
        if path.exists():
            what = "an existing folder without offramp.json" if path.is_dir() else "a file"
        elif working_folder(path).is_dir():
            what = "its training is not finished"
            fix = "run the same `offramp train` command again: it goes on where it stopped"
        raise OfframpError(f"the run folder {str(folder)!r}", what, fix)
    spec = read_json(path / "offramp.json")
    written = spec.get("format") if isinstance(spec, dict) else None
    if written == 1 and isinstance(spec.get("options"), dict):
        return format1.description(spec)
    if written != FORMAT:
        raise OfframpError(
            f"a model folder of format {FORMAT}",
            f"{folder}, whose offramp.json says format {written}",
            "load it with the Offramp version that wrote it, or train again",
        )
    made: dict[str, Any] = spec
    return made


def read_recipe(folder: str | Path) -> dict[str, Any]:
    """recipe.yaml of a run: how it was trained; empty for a folder made in other ways."""
    path = Path(folder) / "recipe.yaml"
    try:
        made = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({_first_line(error)})", "restore it") from error
    return made if isinstance(made, dict) else {}


def task_from_description(spec: dict[str, Any]) -> Task:
    """The task that an offramp.json tells of."""
    return tasks.get(spec["task"]["name"]).from_json(spec["task"])


def load_run(folder: str | Path) -> LoadedRun:
    """A model folder with all its parts."""
    path, spec = Path(folder), read_description(folder)
    tokenizer = load_tokenizer(str(path))
    try:
        task = task_from_description(spec).with_tokenizer(tokenizer)
        method, longest, base_model = methods.get(spec["method"]), int(spec["max_length"]), str(spec["base_model"])
        options = methods.configure(method.options, spec["options"], spec["method"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = f"a damaged offramp.json ({type(error).__name__}: {_first_line(error)})"
        raise OfframpError(f"the model folder {folder}", given, "restore it or train again") from error
    hf = load_backbone(str(path), task, whole=True)
    check_tokenizer_size(tokenizer, hf, str(path))
    net = build_network(hf, task, method, options)
    try:
        net.added.load_state_dict(format1.tensors(load_file(path / "offramp.safetensors")))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _no_added(path, error) from error
    method.prepare(net, options)
    net.eval()
    return LoadedRun(net, tokenizer, method, options, longest, base_model, path)
