"""Words leave one by one: windows stay inside a sentence, tags freeze, halted states are exact copies."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp import engines, methods
from offramp.core.loop import State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import PairPolicy, Policy
from offramp.inference.run_folder import build_network
from offramp.methods.token_exit import TokenExitPolicy, TokenExitSettings, largest_in_window
from offramp.nn.confidence import normalised_entropy
from offramp.nn.network import Network
from offramp.tasks import get
from offramp.training.forward import forward_all_layers
from tests import factories

LENGTHS = [9, 4, 17]


def tagger() -> Network:
    rows = [{"tokens": ["a", "b", "c"], "tags": ["O", "B-X", "I-X"]}]
    spec = get("tagging").from_rows(rows, "rows")
    method = methods.get("token_exit")
    torch.manual_seed(1)
    net = build_network(factories.hf_model("bert", spec.auto_class), spec, method, method.options())
    net.eval()
    return net


def test_windows_do_not_look_into_the_next_sentence() -> None:
    uncertainty, row = torch.tensor([0.1, 0.2, 0.9, 0.3, 0.0]), torch.tensor([0, 0, 1, 1, 1])
    assert largest_in_window(uncertainty, row, 1).tolist() == uncertainty.tolist()
    assert torch.allclose(largest_in_window(uncertainty, row, 3), torch.tensor([0.2, 0.2, 0.9, 0.9, 0.3]))
    assert torch.allclose(largest_in_window(uncertainty, row, 5), torch.tensor([0.2, 0.2, 0.9, 0.9, 0.9]))


def middling(net: Network, packed: Packed) -> float:
    """A doubt that about half of all words are below after the first layer."""
    with torch.no_grad():
        return float(normalised_entropy(net(1, forward_all_layers(net.encoder, packed).after(1))).median())


class Watch(Policy):
    """Notes what had left and every state after each layer."""

    def __init__(self) -> None:
        self.left: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        whole = torch.full((sum(LENGTHS),), -2)
        whole[s.packed.tokens["origin"]] = s.packed.tokens.get("exited_at", -1)
        states = torch.zeros(sum(LENGTHS), s.packed.states.shape[1])
        states[s.packed.tokens["origin"]] = s.packed.states
        self.left[layer], self.states[layer] = whole, states
        return None


def test_tags_freeze_and_halted_states_are_copies() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    threshold = middling(net, packed)
    watch = Watch()
    with torch.no_grad():
        policy = PairPolicy(TokenExitPolicy(net, TokenExitSettings(threshold, window=1)), watch)
        result = run(engines.make("torch", net.encoder), net, policy, packed)
    halted = watch.left[1] >= 0
    going = (watch.left[2] != -2) & halted  # halted after layer 1, in a sentence that went on
    assert halted.any() and not halted.all() and going.any()
    assert torch.equal(watch.states[2][going], watch.states[1][going])
    with torch.no_grad():
        first = net(1, packed.with_states(watch.states[1]))
    new = (watch.left[1] == 1) & (watch.left[1] != -2)
    assert torch.allclose(result.logits[new], first[new], atol=1e-5)


def test_without_a_threshold_everybody_goes_to_the_end() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    with torch.no_grad():
        result = run(engines.make("torch", net.encoder), net, TokenExitPolicy(net, TokenExitSettings()), packed)
    assert result.exit_layer.tolist() == [net.depth] * 3


def test_exit_layers_are_means_over_tokens() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    with torch.no_grad():
        settings = TokenExitSettings(middling(net, packed), window=1)
        result = run(engines.make("torch", net.encoder), net, TokenExitPolicy(net, settings), packed)
    assert any(layer != int(layer) for layer in result.exit_layer.tolist())
    assert all(0 <= layer <= net.depth for layer in result.exit_layer.tolist())
