"""The run folder: plain `transformers` opens it as the full model, Offramp as the adaptive one.

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
from torch import Tensor

from offramp import __version__, backbones, methods, tasks
from offramp.errors import OfframpError
from offramp.inference import format1
from offramp.methods import Method
from offramp.nn.network import Network, bare_network
from offramp.tasks import Task
from offramp.utils import schema
from offramp.utils.files import read_json, write_json
from offramp.utils.hf_logging import quiet_transformers
from offramp.utils.run_paths import is_hub_name, is_run, working_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 2  # what this version writes; it also reads format 1 (inference/format1.py)


@dataclass(frozen=True)
class LoadedRun:
    """A run folder in memory."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    method: Method
    options: Any
    max_length: int
    base_model: str
    folder: Path | None = None


def check_backbone(source: str) -> None:
    """Refuse a model (folder or hub name) whose family has no backbone file; reads one small file."""
    if not Path(source).is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise _no_model(source, FileNotFoundError("no such folder"))
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as error:
        raise _no_model(source, error) from error
    backbones.find(config.get("model_type", "unknown"))


def load_backbone(source: str, task: Task, complete: bool = False) -> PreTrainedModel:
    """Return a Hugging Face model for a task, from a folder or a hub name: safetensors, float32, no remote code."""
    return load_backbone_and_missing(source, task, complete)[0]


def load_backbone_and_missing(
    source: str, task: Task, complete: bool = False
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Return the model and the names of parameters that its file lacks.

    A pretrained model lacks the task's head (and perhaps a pooler), which are then newly initialised; a finished one
    (`complete`) may lack nothing.
    """
    auto = getattr(transformers, task.auto_class)
    safe = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            model, report = auto.from_pretrained(
                source, **safe, ignore_mismatched_sizes=True, output_loading_info=True, **task.config()
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _no_model(source, error, complete) from error
    missing = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if complete and missing:
        listed = f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}"
        given = f"{source}, whose model.safetensors lacks {listed}"
        raise OfframpError("all weights of a trained model", given, "restore the folder or train again")
    return model, frozenset(missing)


def task_with_model_labels(source: str, task: Task) -> tuple[Task, str | None]:
    """Return a task with labels in the order of a model's head, and why that head cannot serve it, if it cannot.

    A model without a head for this kind of task (a pretrained one) gives no reason: its head is new anyway.
    """
    config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    architecture = str((config.get("architectures") or ["unknown"])[0])
    if task.over_vocabulary or not tasks.has_new_head(config):
        return task, None
    if not task.has_head(config):
        return task, f"{architecture} has a head for another task"
    named = config.get("id2label") or {}
    count = len(named) or int(config.get("num_labels") or 2)
    names = [str(named.get(str(place), named.get(place, f"LABEL_{place}"))) for place in range(count)]
    ordered = task.with_model_labels(names)
    if ordered is None:
        return task, f"its labels are {', '.join(names[:10])}{' …' if count > 10 else ''}"
    return ordered, None


def renew_head(hf: PreTrainedModel) -> frozenset[str]:
    """Give the head of a model, what lies above its backbone, new weights; return the names of its parameters."""
    prefix = f"{hf.base_model_prefix}."
    fresh = type(hf)(hf.config).state_dict()
    names = frozenset(name for name, _ in hf.named_parameters() if not name.startswith(prefix))
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name in names:
                parameter.copy_(fresh[name])
    return names


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside a model."""
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=False
            )
    except Exception as error:  # the Rust library raises bare Exceptions; whatever it is, the files are unusable
        raise OfframpError(
            "a tokenizer", f"{source!r}: {_first_line(error)}", "put tokenizer.json beside the model's weights"
        ) from error
    return tokenizer


def check_tokenizer_size(tokenizer: PreTrainedTokenizerBase, hf: PreTrainedModel, source: str) -> None:
    """Refuse a tokenizer with less than half of the model's vocabulary: without its file transformers builds an empty
    one."""
    known, wanted = len(tokenizer), int(hf.config.vocab_size)
    if 2 * known < wanted:
        given = f"{source}, whose tokenizer knows {known} pieces where the model has {wanted}"
        raise OfframpError("the tokenizer of a model", given, "put its tokenizer.json beside the model's weights")


def _no_model(source: str, error: Exception, complete: bool = False) -> OfframpError:
    if complete:
        return OfframpError(f"the trained model in {source}", _first_line(error), "restore the folder or train again")
    fix = "give a folder with config.json and model.safetensors, or the name of a model on the hub"
    return OfframpError("a pretrained model", f"{source!r}: {_first_line(error)}", fix)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def build_network(
    hf: PreTrainedModel, task: Task, method: Method, options: Any, missing: frozenset[str] = frozenset()
) -> Network:
    """Return a network with the method's modules in it; `missing` names parameters of `hf` that no file held."""
    net = replace(bare_network(hf, task), newly_initialized=missing)
    methods.check_serves(method, task)
    for name, module in method.modules(net, options).items():
        net.added[name] = module
    return net


def reuse_added_modules(net: Network, method: Method, source: str) -> None:
    """Load added modules from an earlier run of the same method that now serves as a pretrained model.

    A predictor of depths that was pretrained with its backbone continues to learn. What the method says belongs to a
    task, such as exit heads, is newly initialised, and lengths are those of this run's options.
    """
    path = Path(source)
    if not is_run(path) or read_description(path)["method"] != method.name:
        return
    new = tuple(f"{key}." for key in method.of_a_task)
    shapes = {name: t.shape for name, t in net.added.state_dict().items() if not name.startswith(new)}
    try:
        stored = _load_added(path)
    except (OSError, SafetensorError) as error:
        raise _no_added(path, error) from error
    net.added.load_state_dict({name: t for name, t in stored.items() if shapes.get(name) == t.shape}, strict=False)


def _load_added(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the added modules under their present names."""
    stored = load_file(folder / "offramp.safetensors")
    return format1.tensors(stored) if read_json(folder / "offramp.json").get("format") == 1 else stored


def _no_added(path: Path, error: Exception) -> OfframpError:
    given = f"a damaged or foreign offramp.safetensors ({_first_line(error)})"
    return OfframpError(f"the added modules of {path}", given, "restore it or train again")


def save_run(folder: Path, model: LoadedRun) -> None:
    """Write everything but points, recipe and card; callers write a temporary folder that then takes its place."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.network.hf.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    save_added(folder, model)


def save_added(folder: Path, model: LoadedRun) -> None:
    """Write what Offramp adds to a model's own files: offramp.json and offramp.safetensors."""
    added = {name: t.detach().contiguous().cpu() for name, t in model.network.added.state_dict().items()}
    save_file(added, folder / "offramp.safetensors", metadata={"format": "pt"})
    write_json(folder / "offramp.json", run_description(model))
    for path in folder.glob("*.safetensors"):  # safetensors lets only their owner read them
        path.chmod((folder / "offramp.json").stat().st_mode)


def run_description(model: LoadedRun) -> dict[str, Any]:
    """Return the contents of offramp.json."""
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
    """Return offramp.json of a run, checked and with the names of the present format; refuse what is not a run."""
    path = Path(folder)
    if not is_run(path):
        given, fix = "no such folder", "give the folder that `offramp train --out` wrote"
        if path.exists():
            given = "an existing folder without offramp.json" if path.is_dir() else "a file"
        elif working_folder(path).is_dir():
            given = "its training is not finished"
            fix = "run the same `offramp train` command again: it continues where it stopped"
        elif is_hub_name(str(folder)):
            given = "a name on the hub, where a folder of this machine is needed"
            fix = f"download it, `hf download {folder} --local-dir FOLDER`, and give that folder"
        raise OfframpError(f"the run folder {str(folder)!r}", given, fix)
    stored = read_json(path / "offramp.json")
    written = stored.get("format") if isinstance(stored, dict) else None
    if isinstance(written, bool) or written not in (1, FORMAT):
        raise OfframpError(
            f"a run folder of format 1 or {FORMAT}",
            f"{folder}, whose offramp.json states format {written}",
            "load it with the Offramp version that wrote it, or train again",
        )
    description: dict[str, Any] = format1.description(stored) if written == 1 else stored
    _check_description(description, path)
    return description


@dataclass(frozen=True)
class RunDescription:
    """What every offramp.json holds."""

    method: str
    options: dict[str, Any]
    task: dict[str, Any]
    max_length: int
    base_model: str


def _check_description(description: dict[str, Any], folder: Path) -> None:
    """Refuse an offramp.json that lacks a field or holds a value of another type."""
    try:
        known = schema.from_json(RunDescription, description, ignore_unknown=True)
        schema.checked(str, known.task.get("name"), "task.name")
        for name in ("labels", "tags", "texts"):
            if name in known.task:
                _check_names(known.task[name], f"task.{name}")
        if known.max_length < 1:
            raise schema.SchemaError(f"max_length is {known.max_length}")
    except schema.SchemaError as error:
        raise _damaged(folder, str(error)) from error


def _check_names(values: Any, place: str) -> None:
    """Refuse labels, tags or columns that are not a list of different texts, whole numbers, or true and false."""
    usable = isinstance(values, list) and values and all(isinstance(value, str | int) for value in values)
    if not usable or len({(type(value), value) for value in values}) < len(values):
        raise schema.SchemaError(f"{place} is {values!r:.60}")


def _damaged(folder: str | Path, why: str) -> OfframpError:
    given = f"a damaged offramp.json ({why})"
    return OfframpError(f"the run folder {folder}", given, "restore it or train again")


def _check_labels(folder: Path, task: Task) -> None:
    """Refuse labels that contradict the model's own config.json."""
    ours = task.config().get("id2label")
    try:
        theirs = transformers.PreTrainedConfig.get_config_dict(str(folder))[0].get("id2label")
    except (OSError, ValueError) as error:
        raise _no_model(str(folder), error, complete=True) from error
    if ours is None or not isinstance(theirs, dict):
        return
    stored = {str(number): str(label) for number, label in theirs.items()}
    if stored != {str(number): label for number, label in ours.items()}:
        labels = f"labels {list(ours.values())!r:.100} where config.json has {list(stored.values())!r:.100}"
        raise _damaged(folder, labels)


def read_recipe(folder: str | Path) -> dict[str, Any]:
    """Return recipe.yaml of a run, how it was trained; empty for a folder that has none."""
    path = Path(folder) / "recipe.yaml"
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OfframpError(f"to read {path}", f"a damaged file ({_first_line(error)})", "restore it") from error
    return format1.recipe(recipe) if isinstance(recipe, dict) else {}


def remembered_columns(folder: str | Path) -> dict[str, str]:
    """Return the names of columns that a run was trained with (`--column`): our name → the file's."""
    columns = read_recipe(folder).get("columns")
    if not isinstance(columns, dict):
        return {}
    return {name: column for name, column in columns.items() if isinstance(name, str) and isinstance(column, str)}


def task_from_description(description: dict[str, Any]) -> Task:
    """Return the task that an offramp.json describes."""
    return tasks.get(description["task"]["name"]).from_json(description["task"])


def load_run(folder: str | Path) -> LoadedRun:
    """Return a run folder with all its parts."""
    path, description = Path(folder), read_description(folder)
    tokenizer = load_tokenizer(str(path))
    try:
        task = task_from_description(description).with_tokenizer(tokenizer)
        method = methods.get(description["method"])
        options = methods.configure(method.options, {**method.earlier_options, **description["options"]}, method.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {_first_line(error)}") from error
    _check_labels(path, task)
    hf = load_backbone(str(path), task, complete=True)
    check_tokenizer_size(tokenizer, hf, str(path))
    try:
        net = build_network(hf, task, method, options)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, OfframpError):
            raise
        raise _damaged(folder, f"options that build no model: {_first_line(error)}") from error
    longest, positions = description["max_length"], net.encoder.positions
    if longest > positions:
        raise _damaged(folder, f"max_length is {longest}, and the model takes rows of {positions} tokens")
    try:
        net.added.load_state_dict(_load_added(path))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise _no_added(path, error) from error
    method.prepare(net, options)
    net.eval()
    return LoadedRun(net, tokenizer, method, options, description["max_length"], description["base_model"], path)
