"""Words leave one by one: windows stay inside a sentence, tags freeze, halted states are exact copies."""

from __future__ import annotations

import torch
from torch import Tensor

from offramp import engines
from offramp.core.loop import State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import PairPolicy, Policy
from offramp.methods.token_exit import TokenExitPolicy, TokenExitSettings, largest_in_window
from offramp.nn.confidence import normalised_entropy
from offramp.nn.network import Network
from offramp.training.forward import forward_all_layers
from tests import factories

LENGTHS = [9, 4, 17]


def tagger() -> Network:
    return factories.network("token_exit", "tagging", seed=None)


def test_largest_in_window_ends_at_the_row() -> None:
    uncertainty, row = torch.tensor([0.1, 0.2, 0.9, 0.3, 0.0]), torch.tensor([0, 0, 1, 1, 1])
    assert largest_in_window(uncertainty, row, 1).tolist() == uncertainty.tolist()
    assert torch.allclose(largest_in_window(uncertainty, row, 3), torch.tensor([0.2, 0.2, 0.9, 0.9, 0.3]))
    assert torch.allclose(largest_in_window(uncertainty, row, 5), torch.tensor([0.2, 0.2, 0.9, 0.9, 0.9]))


def median_uncertainty(net: Network, packed: Packed) -> float:
    """Return an uncertainty that about half of all words are below after the first layer."""
    with torch.no_grad():
        return float(normalised_entropy(net(1, forward_all_layers(net.encoder, packed).after(1))).median())


class TokenRecorder(Policy):
    """Records after each layer at which layer each token halted (−2: its row has exited) and its state."""

    def __init__(self) -> None:
        self.exited_at: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        exited_at = torch.full((sum(LENGTHS),), -2)
        exited_at[s.packed.tokens["origin"]] = s.packed.tokens.get("exited_at", -1)
        states = torch.zeros(sum(LENGTHS), s.packed.states.shape[1])
        states[s.packed.tokens["origin"]] = s.packed.states
        self.exited_at[layer], self.states[layer] = exited_at, states
        return None


def test_halted_words_keep_their_tag_and_their_state() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    threshold = median_uncertainty(net, packed)
    recorder = TokenRecorder()
    with torch.no_grad():
        policy = PairPolicy(TokenExitPolicy(net, TokenExitSettings(threshold, window=1)), recorder)
        result = run(engines.make("torch", net.encoder), net, policy, packed)
    halted = recorder.exited_at[1] >= 0
    going = (recorder.exited_at[2] != -2) & halted  # halted after layer 1, in a sentence that went on
    assert halted.any() and not halted.all() and going.any()
    assert torch.equal(recorder.states[2][going], recorder.states[1][going])
    with torch.no_grad():
        first = net(1, packed.with_states(recorder.states[1]))
    new = (recorder.exited_at[1] == 1) & (recorder.exited_at[1] != -2)
    assert torch.allclose(result.logits[new], first[new], atol=1e-5)


def test_threshold_of_zero_runs_all_layers() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    with torch.no_grad():
        result = run(engines.make("torch", net.encoder), net, TokenExitPolicy(net, TokenExitSettings()), packed)
    assert result.exit_layer.tolist() == [net.depth] * 3


def test_exit_layer_of_a_row_is_the_mean_over_tokens() -> None:
    net = tagger()
    packed = pack(factories.token_ids(LENGTHS)).with_tokens(scored=torch.ones(sum(LENGTHS), dtype=torch.bool))
    with torch.no_grad():
        settings = TokenExitSettings(median_uncertainty(net, packed), window=1)
        result = run(engines.make("torch", net.encoder), net, TokenExitPolicy(net, settings), packed)
    assert any(layer != int(layer) for layer in result.exit_layer.tolist())
    assert all(0 <= layer <= net.depth for layer in result.exit_layer.tolist())
