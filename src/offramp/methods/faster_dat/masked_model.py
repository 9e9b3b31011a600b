"""A masked language model that answers after every layer (Liu et al. 2021).

It stands beside the network that is trained, starts from the same checkpoint and uses that checkpoint's own head, one
for all layers.
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

AUTO = "AutoModelForMaskedLM"
SHARE = 0.15  # of the words are hidden in training
ASKED = "a masked language model of the backbone"
WAY_OUT = "say --set estimation=mi, or start from a checkpoint that can guess masked words"


class MaskedModel(nn.Module):
    """Holds the masked model while it is needed: empty at first, filled from a checkpoint or from a saved folder."""

    mask_id: Tensor

    def __init__(self, config: Any, stays: bool) -> None:
        super().__init__()
        self.config, self.stays = config, stays  # stays: needed at run time too
        self.made_head = False  # the checkpoint had none
        self.model: Any = None
        self.register_buffer("mask_id", torch.tensor(-1))
        self.register_state_dict_post_hook(_once)

    def load(self, source: str | None) -> None:
        """The checkpoint's masked model, its own head or a fresh one tied to the embeddings, and its mask token. A run
        folder has lost that head: what the run started from comes first, if it is still there."""
        if not source:
            raise OfframpError(ASKED, "a model that was not read from a checkpoint", WAY_OUT)
        base = _started_from(source)
        found = None if base is None else _read_alike(base, self.config)
        model, self.made_head, mask = found or _read(source)
        source = source if base is None or found is None else base
        if self.made_head:
            warnings.warn(f"{source} has no masked-language head: one tied to its embeddings is added", stacklevel=3)
        self.model, self.mask_id = model, torch.tensor(mask)

    def clear(self) -> None:
        """Forget the model."""
        self.model = None

    @property
    def encoder(self) -> Encoder:
        """Its backbone."""
        assert self.model is not None, "filled by stages() or by loading"
        return backbones.encoder(self.model)

    @property
    def head(self) -> Head:
        """The classifier that all layers share."""
        assert self.model is not None, "filled by stages() or by loading"
        return backbones.head(self.model, AUTO)

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        if any(name.startswith(f"{prefix}model.") for name in state_dict):
            self.model = getattr(transformers, AUTO).from_config(self.config)
            first: dict[int, str] = {}
            for name, tensor in self.model.state_dict().items():  # tied tensors are saved once
                twin = f"{prefix}model.{first.setdefault(tensor.data_ptr(), name)}"
                if twin in state_dict:
                    state_dict.setdefault(f"{prefix}model.{name}", state_dict[twin])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _once(module: nn.Module, state: MutableMapping[str, Any], prefix: str, _: Any) -> None:
    """Tensors that share memory are saved under their first name only."""
    seen: set[int] = set()
    for name in [name for name in state if name.startswith(f"{prefix}model.")]:
        if state[name].data_ptr() in seen:
            del state[name]
        else:
            seen.add(state[name].data_ptr())


def _started_from(source: str) -> str | None:
    """The pretrained model of a run folder; of anything else nothing."""
    try:
        base = json.loads((Path(source) / "offramp.json").read_text(encoding="utf-8"))["base_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return base if isinstance(base, str) and base else None


def _read_alike(source: str, config: Any) -> tuple[Any, bool, int] | None:
    """What a run started from; nothing if it is gone, or another model goes by its name now."""
    try:
        found = _read(source)
    except OfframpError:
        return None
    same = ("model_type", "vocab_size", "hidden_size")
    fits = all(getattr(found[0].config, name, None) == getattr(config, name, None) for name in same)
    return found if fits else None


def _read(source: str) -> tuple[Any, bool, int]:
    """A masked model, whether its head had to be made, and its mask token."""
    safe = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            auto, words = transformers.AutoModelForMaskedLM, transformers.AutoTokenizer
            model, report = auto.from_pretrained(source, output_loading_info=True, **safe)
            mask = words.from_pretrained(source, trust_remote_code=False).mask_token_id
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise OfframpError(ASKED, f"{source!r}: {str(error).strip().splitlines()[0]}", WAY_OUT) from error
    if mask is None:
        raise OfframpError(ASKED, f"{source!r}, whose tokenizer has no mask token", WAY_OUT)
    return model, bool(report["missing_keys"]), mask


def layer_losses(model: MaskedModel, packed: Packed, hidden: Tensor, targets: Tensor, layers: int) -> Tensor:
    """The loss of every hidden token after every layer: token indices [hidden] → [layers, hidden]."""
    encoder, head = model.encoder, model.head
    made = forward_all_layers(encoder, packed, ForwardHooks(skip=lambda layer: layer > layers))
    count, losses = torch.tensor([len(hidden)]), []
    for layer in range(1, layers + 1):
        states = encoder.final(made.states[layer].index_select(0, hidden))
        logits = head.apply(Packed(states, count)).float()
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.stack(losses)


def training_loss(model: MaskedModel, packed: Packed, layers: int) -> Tensor:
    """Words hidden at random, guessed after every layer, all layers alike. Of ten hidden words eight become the mask,
    one other tokens of the batch, one stays."""
    words, ids = words_of(packed), packed.tokens[ID]
    draw = torch.rand(len(words.key) + 1, device=ids.device)
    if len(words.key) and not bool((draw[:-1] < SHARE).any()):
        draw[draw[:-1].argmin()] = 0.0
    draw[-1] = 1.0  # what special tokens read
    fate = draw[words.of_token]
    hidden = (fate < SHARE).nonzero().squeeze(1)
    other = ids[torch.randint(len(ids), (len(ids),), device=ids.device)]
    corrupt = torch.where(fate < 0.9 * SHARE, other, ids)
    corrupt = torch.where(fate < 0.8 * SHARE, model.mask_id.to(ids.device), corrupt)
    losses = layer_losses(model, packed.with_tokens(id=corrupt), hidden, ids[hidden], layers)
    return losses.sum() / max(1, losses.numel())


def masked_model_of(network: Network) -> MaskedModel | None:
    found = "masked" in network.added
    return network.added["masked"] if found else None  # type: ignore[return-value]  # a ModuleDict
