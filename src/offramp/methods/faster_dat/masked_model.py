"""A masked language model with a prediction after every layer (Liu et al. 2021).

It is separate from the network that is trained, starts from the same checkpoint and uses that checkpoint's own head,
one for all layers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from offramp import backbones
from offramp.backbones import Encoder, Head
from offramp.core.columns import ID
from offramp.core.packed import Packed
from offramp.errors import OfframpError
from offramp.nn.network import Network
from offramp.nn.words import words_of
from offramp.training.forward import ForwardHooks, forward_all_layers
from offramp.utils.hf_logging import quiet_transformers

MASKED_MODEL = "masked"  # key of the method's module in Network.added
AUTO = "AutoModelForMaskedLM"
MASKED_SHARE = 0.15  # of the words are masked in training
REQUEST = "a masked language model of the backbone"
FIX = "use --set estimation=mi, or start from a checkpoint that can predict masked words"


class MaskedModel(nn.Module):
    """Holds the masked model while it is needed; it is empty until it is read from a checkpoint or a run folder."""

    mask_id: Tensor

    def __init__(self, config: Any, used_at_run_time: bool) -> None:
        super().__init__()
        self.config, self.used_at_run_time = config, used_at_run_time
        self.has_new_head = False  # the checkpoint had none
        self.model: Any = None
        self.register_buffer("mask_id", torch.tensor(-1))
        self.register_state_dict_post_hook(_drop_shared_tensors)

    def load(self, source: str | None, base: str | None = None) -> None:
        """Read the masked model of a checkpoint, with its own head or a new one tied to the embeddings, and its mask
        token. A run folder no longer has that head, so that the model the run started from (`base`, or what the folder
        names) is tried first."""
        if not source:
            raise OfframpError(REQUEST, "a model that was not read from a checkpoint", FIX)
        base = base or _started_from(source)
        found = None if base is None else _read_if_same(base, self.config)
        model, self.has_new_head, mask = found or _read(source)
        source = source if base is None or found is None else base
        if self.has_new_head:
            warnings.warn(f"{source} has no masked-language head: one tied to its embeddings is added", stacklevel=3)
        self.model, self.mask_id = model, torch.tensor(mask)

    def clear(self) -> None:
        """Remove the model."""
        self.model = None

    @property
    def encoder(self) -> Encoder:
        """The backbone of the masked model."""
        assert self.model is not None, "stages() or loading has read it"
        return backbones.encoder(self.model)

    @property
    def head(self) -> Head:
        """The head that all layers share."""
        assert self.model is not None, "stages() or loading has read it"
        return backbones.head(self.model, AUTO)

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        if any(name.startswith(f"{prefix}model.") for name in state_dict):
            self.model = getattr(transformers, AUTO).from_config(self.config)
            first: dict[int, str] = {}
            for name, tensor in self.model.state_dict().items():  # tied tensors are stored once
                twin = f"{prefix}model.{first.setdefault(tensor.data_ptr(), name)}"
                if twin in state_dict:
                    state_dict.setdefault(f"{prefix}model.{name}", state_dict[twin])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _drop_shared_tensors(module: nn.Module, state: MutableMapping[str, Any], prefix: str, _: Any) -> None:
    """Keep tensors that share memory under their first name only."""
    addresses: set[int] = set()
    for name in [name for name in state if name.startswith(f"{prefix}model.")]:
        if state[name].data_ptr() in addresses:
            del state[name]
        else:
            addresses.add(state[name].data_ptr())


def _started_from(source: str) -> str | None:
    """Return the pretrained model that a run folder names; None for anything else."""
    try:
        base = json.loads((Path(source) / "offramp.json").read_text(encoding="utf-8"))["base_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = isinstance(base, str) and (Path(base).is_dir() or "/" in base)  # a bare name is that of a folder elsewhere
    return base if known else None


def _read_if_same(source: str, config: Any) -> tuple[Any, bool, int] | None:
    """Return the model a run started from; None if it no longer exists, or if its name now means another model."""
    try:
        found = _read(source)
    except OfframpError:
        return None
    names = ("model_type", "vocab_size", "hidden_size")
    same = all(getattr(found[0].config, name, None) == getattr(config, name, None) for name in names)
    return found if same else None


def _read(source: str) -> tuple[Any, bool, int]:
    """Return a masked model, whether its head is new, and its mask token."""
    safe = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            auto, words = transformers.AutoModelForMaskedLM, transformers.AutoTokenizer
            model, report = auto.from_pretrained(source, output_loading_info=True, **safe)
            mask = words.from_pretrained(source, trust_remote_code=False).mask_token_id
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise OfframpError(REQUEST, f"{source!r}: {str(error).strip().splitlines()[0]}", FIX) from error
    if mask is None:
        raise OfframpError(REQUEST, f"{source!r}, whose tokenizer has no mask token", FIX)
    return model, bool(report["missing_keys"]), mask


def layer_losses(model: MaskedModel, packed: Packed, masked: Tensor, targets: Tensor, layers: int) -> Tensor:
    """Return the loss of every masked token after every layer: token indices [masked] → [layers, masked]."""
    encoder, head = model.encoder, model.head
    states = forward_all_layers(encoder, packed, ForwardHooks(skip=lambda layer: layer > layers))
    count, losses = torch.tensor([len(masked)]), []
    for layer in range(1, layers + 1):
        selected = encoder.final(states.states[layer].index_select(0, masked))
        logits = head.apply(Packed(selected, count)).float()
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.stack(losses)


def masked_model_loss(model: MaskedModel, packed: Packed, layers: int) -> Tensor:
    """Return the mean loss of randomly selected words after every layer, all layers with the same weight. Of ten
    selected words eight are masked, one becomes other tokens of the batch, one is left unchanged."""
    words, ids = words_of(packed), packed.tokens[ID]
    draw = torch.rand(len(words.key) + 1, device=ids.device)
    if len(words.key) and not bool((draw[:-1] < MASKED_SHARE).any()):
        draw[draw[:-1].argmin()] = 0.0
    draw[-1] = 1.0  # of special tokens
    token_draw = draw[words.of_token]
    selected = (token_draw < MASKED_SHARE).nonzero().squeeze(1)
    other = ids[torch.randint(len(ids), (len(ids),), device=ids.device)]
    corrupt = torch.where(token_draw < 0.9 * MASKED_SHARE, other, ids)
    corrupt = torch.where(token_draw < 0.8 * MASKED_SHARE, model.mask_id.to(ids.device), corrupt)
    losses = layer_losses(model, packed.with_tokens(id=corrupt), selected, ids[selected], layers)
    return losses.sum() / max(1, losses.numel())


def masked_model_of(network: Network) -> MaskedModel | None:
    """Return the masked model of a network, if it has one."""
    found = MASKED_MODEL in network.added
    return network.added[MASKED_MODEL] if found else None  # type: ignore[return-value]  # a ModuleDict
