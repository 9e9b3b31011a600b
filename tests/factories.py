"""Small things that tests need: models, tokenizers, rows, networks, batches, policies and run folders.

Everything is random but seeded, built in memory or in a temporary folder, and nothing is downloaded. The parts:

- `hf_model`, `hf_translation_model`: tiny random Hugging Face models; `token_ids`, `hf_padded` go with them.
- `wordpiece_tokenizer`, `bytelevel_tokenizer`: tokenizers of the two kinds that behave differently.
- `make_task`, `data`, `batch`, `network`, `exit_network`, `translation_network`, `run_policy`, `run_decoding`: in
  memory.
- `training_setup`, `trainer`: a network with its stages and rows, and a trainer for them.
- `ExitAt`, `KeepFirst`, `SetGates`: policies that do one thing at a stated moment.
- `labelled_rows`, `translation_rows`, `write_jsonl`, `model_folder`, `run_folder`, `translation_run_folder`: files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import offramp.backbones  # noqa: F401  # registers our own family with transformers
from offramp import engines, methods, tasks
from offramp.commands.train import TrainRequest, run_training
from offramp.core.attention import AttentionScores
from offramp.core.columns import ORIGIN, POSITION
from offramp.core.loop import Result, State, run
from offramp.core.packed import Packed, pack
from offramp.core.policy import Needs, Policy
from offramp.data.tokenization import Encoded
from offramp.decoding.beam_search import GenerationRules, Hypothesis, generate
from offramp.decoding.decoder import generation_rules, pad_packed, step_decoder
from offramp.decoding.loop import Decoding
from offramp.inference.batching import score_for_training
from offramp.inference.run_folder import build_network, load_backbone, load_tokenizer, quiet_transformers
from offramp.nn import batches
from offramp.nn.batches import Batch, Data
from offramp.nn.exit_policies import ExitOptions, build_exit_heads
from offramp.nn.keys import EXIT_HEADS
from offramp.nn.network import Network, bare_network
from offramp.tasks import Task
from offramp.training.forward import forward_all_layers
from offramp.training.schedule import Schedule
from offramp.training.stage import Stage
from offramp.training.trainer import Trainer

# Hugging Face models

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {  # every encoder backbone; a test checks that none is missing
    "alberta": {"embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 4, "relative_reach": 5},
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 3},
    "albert": {"embedding_size": 16, "num_hidden_groups": 2, "num_hidden_layers": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
    "mpnet": {"pad_token_id": 1, "relative_attention_num_buckets": 32},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
}
BACKBONES = sorted(CONFIGS)
DISTILBERT_KEYS = {"vocab_size", "max_position_embeddings", "pad_token_id"}  # of SHAPE
SEQ2SEQ_BACKBONES = ("bart", "marian")
SEQ2SEQ_SHAPE = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "bos_token_id": None,
    "forced_eos_token_id": None,
}
AUTO_CLASSES = {  # task → Hugging Face class
    "classification": "AutoModelForSequenceClassification",
    "multi_label": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "tagging": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "masked_lm": "AutoModelForMaskedLM",
}


def hf_model(
    backbone: str = "bert", auto_class: str = AUTO_CLASSES["classification"], seed: int = 0, **config: Any
) -> Any:
    """Return a tiny random Hugging Face model in evaluation mode, with weights large enough that rows differ."""
    shape = {key: value for key, value in SHAPE.items() if backbone != "distilbert" or key in DISTILBERT_KEYS}
    values = {**shape, **CONFIGS[backbone], "num_labels": 3, **config}
    torch.manual_seed(seed)
    hf = getattr(transformers, auto_class).from_config(transformers.AutoConfig.for_model(backbone, **values))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return hf.eval()


def hf_translation_model(backbone: str = "marian", seed: int = 0, **config: Any) -> Any:
    """Return a tiny random encoder–decoder whose outputs differ from sentence to sentence."""
    values = {**SEQ2SEQ_SHAPE, **config}
    torch.manual_seed(seed)
    hf = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(backbone, **values))
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if backbone != "marian" or "embed_positions" not in name:  # Marian's sinusoids are not learned
                parameter.add_(torch.randn_like(parameter) * (0.25 if "attn" in name else 0.1))
    return hf.eval()


def token_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random token ids, none of them special, one list per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 97, (n,), generator=generator).tolist() for n in lengths]


def hf_padded(hf: Any, ids: Sequence[list[int]], **more: Any) -> Any:
    """Return the output of Hugging Face's own model on these rows, padded."""
    longest, filler = max(map(len, ids)), hf.config.pad_token_id
    inputs = torch.tensor([row + [filler] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.no_grad():
        return hf(input_ids=inputs, attention_mask=mask, **more)


# tokenizers

WORDS = "the a film is good bad not very who saw it what in paris lives and or man woman EU rejects call . , ? : -"
PIECES = "##s ##ing ##ly un ##able play ##ed"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@cache
def wordpiece_tokenizer() -> Any:
    """Return a tokenizer like BERT's: lower case, token types, [CLS] a [SEP] b [SEP]; unknown words become letters."""
    letters = [*LETTERS, *("##" + letter for letter in LETTERS)]
    vocabulary = [*SPECIAL.values(), *dict.fromkeys([*WORDS.lower().split(), *PIECES.split(), *letters])]
    ids = {word: index for index, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **SPECIAL)


@cache
def bytelevel_tokenizer() -> Any:
    """Return a tokenizer like RoBERTa's: byte-level BPE, spaces matter, no token types, <s> a </s></s> b </s>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([WORDS, " " + WORDS] * 3, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=inputs, eos_token="</s>", sep_token="</s>", **names
    )


# tasks, rows in memory, networks, batches

LENGTHS = (9, 3, 17, 5)  # tokens of the usual rows


def examples(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Return rows that serve classification, regression, tagging and multi_label, with so many tokens each; three
    labels, and one row in three has none of those that may be many."""
    many = (["x", "y"], ["z"], [])
    return [
        {"text": "a", "label": i % 3, "labels": many[i % 3], "tokens": ["a"] * n, "tags": (["O", "B-X", "I-X"] * n)[:n]}
        for i, n in enumerate(lengths)
    ]


def make_task(name: str = "classification", lengths: Sequence[int] = LENGTHS) -> Task:
    """Return the task that `examples` define."""
    return tasks.get(name).from_rows(examples(lengths), "rows")


def encode(ids: Sequence[list[int]], words: Sequence[list[int]] | None = None) -> list[Encoded]:
    """Return rows of token ids as a tokenizer would, without special tokens; each token is a word unless `words` says
    to which word each token belongs."""
    words = words or [list(range(len(row))) for row in ids]
    return [Encoded(row, [0] * len(row), i, words[i], [], 0) for i, row in enumerate(ids)]


def data(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Data:
    """Return `examples` with random token ids."""
    return Data(examples(lengths), encode(token_ids(lengths, seed)))


def batch(net: Network, rows: Data | None = None, seed: int | None = None) -> Batch:
    """Return all rows as one training batch."""
    rows = rows or data()
    return batches.build_batch(net.task, rows, range(len(rows.encoded)), seed)


def network(
    method: str = "full",
    task: str = "classification",
    backbone: str = "bert",
    *,
    lengths: Sequence[int] = LENGTHS,
    seed: int | None = 1,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Network:
    """Return a tiny random network of a method in evaluation mode; `seed` is that of the method's own modules
    (None: the random numbers that follow those of the model)."""
    chosen, spec = methods.get(method), make_task(task, lengths)
    hf = hf_model(backbone, spec.auto_class, **{"num_labels": spec.outputs, **(config or {})})
    if seed is not None:
        torch.manual_seed(seed)
    net = build_network(hf, spec, chosen, chosen.options(**options))
    net.eval()
    return net


def exit_network(task: str = "classification", backbone: str = "bert", **config: Any) -> Network:
    """Return a tiny random network with plain exit heads, of no method."""
    spec = make_task(task)
    net = bare_network(hf_model(backbone, spec.auto_class, **config), spec)
    torch.manual_seed(5)
    net.added.update({EXIT_HEADS: build_exit_heads(net, ExitOptions())})
    net.eval()
    return net


def translation_network(method: str = "depth_adaptive", backbone: str = "marian", **options: Any) -> Network:
    """Return a tiny random encoder–decoder of a method in evaluation mode."""
    chosen = methods.get(method)
    hf = hf_translation_model(backbone)
    torch.manual_seed(1)
    net = build_network(hf, tasks.get("translation")(), chosen, chosen.options(**options))
    net.eval()
    return net


def run_policy(net: Network, policy: Policy, packed: Packed) -> Result:
    """Return what the loop computes for a batch on the reference engine."""
    with torch.no_grad():
        return run(engines.make("torch", net.encoder), net, policy, packed)


def run_decoding(
    net: Network,
    policy: Policy,
    ids: Sequence[list[int]],
    beams: int = 1,
    rules: GenerationRules | None = None,
    limits: int | Sequence[int] = 14,
) -> tuple[list[Hypothesis], Decoding]:
    """Return the hypotheses of these sources and the decoding they come from; at most `limits` pieces each."""
    packed = pack(list(ids))
    with torch.inference_mode():
        source, _ = pad_packed(packed, forward_all_layers(net.encoder, packed).states[-1])
        decoding = Decoding(step_decoder(net), policy, source, packed.lengths, beams)
        longest = [limits] * len(ids) if isinstance(limits, int) else limits
        return generate(decoding, rules or generation_rules(net), longest), decoding


class TrainingSetup(NamedTuple):
    """What a trainer needs: a new network, its stages, and rows to train and to score on."""

    network: Network
    stages: list[Stage]
    train: Data
    dev: Data


def training_setup(base: str, method: str = "branchynet", kind: str = "classification") -> TrainingSetup:
    """Return a new network of a method on a model folder, with 32 rows to train on and 16 to score on."""
    splits = labelled_rows(kind, 32), labelled_rows(kind, 16, 1)
    tokenizer = load_tokenizer(base)
    task = tasks.get(KINDS[kind]).from_rows(splits[0], "train").with_tokenizer(tokenizer)
    chosen = methods.get(method)
    torch.manual_seed(0)
    net = build_network(load_backbone(base, task), task, chosen, chosen.options())
    train, dev = (Data(rows, task.encode(tokenizer, rows, 64)) for rows in splits)
    return TrainingSetup(net, chosen.stages(net, chosen.options()), train, dev)


def trainer(net: Network, schedule: Schedule, folder: Path, report: Callable[..., None] = lambda **_: None) -> Trainer:
    """Return a trainer that scores dev rows as `offramp train` does."""
    return Trainer(net, schedule, folder, score_for_training, report)


# policies


class ExitAt(Policy):
    """Lets given rows (by their number in the batch) exit after given layers: layer → rows."""

    def __init__(self, plan: dict[int, list[int]]) -> None:
        self.plan = plan

    def should_exit(self, layer: int, s: State) -> Tensor | None:
        return torch.isin(s.packed.rows[ORIGIN], torch.tensor(self.plan.get(layer, []), dtype=torch.int64))


class KeepFirst(Policy):
    """Keeps the first n tokens of each row from given layers on: layer → n; decides at one of the two moments."""

    def __init__(self, plan: dict[int, int], moment: Literal["before_layer", "after_attention"]) -> None:
        self.plan, self.moment = plan, moment

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        return self._keep(layer, s) if self.moment == "before_layer" else None

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        return self._keep(layer, s) if self.moment == "after_attention" else None

    def _keep(self, layer: int, s: State) -> Tensor | None:
        return s.packed.tokens[POSITION] < self.plan[layer] if layer in self.plan else None


class DropLittleAttended(Policy):
    """Drops tokens that received little attention from the others in one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def needs(self, layer: int) -> Needs:
        return Needs(after_attention=True, scores=True)

    def after_attention(self, layer: int, s: State, scores: AttentionScores | None) -> Tensor | None:
        assert scores is not None
        first = s.packed.tokens[POSITION] == 0
        return (scores.columns - scores.diagonal > 0.5) | first if layer == self.layer else None


class SetGates(Policy):
    """Sets the gates of tokens by their position before given layers: layer → gates; the last one serves the rest."""

    def __init__(self, plan: dict[int, list[float]]) -> None:
        self.plan = plan

    def before_layer(self, layer: int, s: State) -> Tensor | None:
        gates = torch.tensor(self.plan.get(layer, [1.0]))
        place = s.packed.tokens[POSITION].clamp(max=len(gates) - 1)
        s.packed = s.packed.with_tokens(gate=gates[place])
        return None


# files: models, labelled rows, trained runs

KINDS = {  # kind of rows → task
    "classification": "classification",
    "pairs": "classification",
    "multi_label": "multi_label",
    "regression": "regression",
    "tagging": "tagging",
    "question_answering": "question_answering",
    "masked_lm": "masked_lm",
}
SPLITS = (("train", 48, 0), ("dev", 24, 1))  # name, rows, seed
FILLERS = ["the", "a", "film", "is", "very", "who", "saw", "it", "what", "and", "or", "man", "woman", "call"]


def model_folder(path: Path, backbone: str = "bert", **config: Any) -> Path:
    """Write a tiny pretrained model with its tokenizer, as a user gives to --model; rows of up to 64 tokens."""
    tokenizer = wordpiece_tokenizer()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, **config}
    with quiet_transformers():
        hf_model(backbone, AUTO_CLASSES["masked_lm"], **shape).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def labelled_rows(kind: str = "classification", count: int = 8, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows that can be learned, because the label depends on a word of the text."""
    rng = random.Random(f"{kind} {seed}")
    return [_labelled_row(kind, rng, number % 2 == 0) for number in range(count)]


def _labelled_row(kind: str, rng: random.Random, good: bool) -> dict[str, Any]:
    words = rng.choices(FILLERS, k=rng.randint(2, 14))
    marked = [*words, "good" if good else "bad"]
    rng.shuffle(marked)
    text = " ".join(marked)
    if kind == "classification":
        return {"text": text, "label": "good" if good else "bad"}
    if kind == "pairs":
        return {"text_a": " ".join(words), "text_b": text, "label": int(good)}
    if kind == "multi_label":  # none, one or two labels
        return {"text": text, "labels": ["good"] * good + ["long"] * (len(words) > 7)}
    if kind == "regression":
        return {"text": text, "label": len(words) / 10 + good}
    if kind == "tagging":
        tags = ["B-ORG" if word in ("good", "bad") else "O" for word in marked]
        return {"tokens": marked, "tags": tags}
    if kind == "question_answering":
        context = f"{text} lives in paris ."
        answers = {"text": ["paris"], "answer_start": [context.index("paris")]}
        return {"question": "who is in it ?", "context": context, "answers": answers}
    return {"text": text}


def write_jsonl(path: Path, content: Sequence[Mapping[str, Any]]) -> str:
    """Write rows to a file and return its path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder and below, hidden ones too, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_folder(
    base: str,
    folder: Path,
    method: str,
    kind: str = "classification",
    report: Callable[..., None] = lambda **_: None,
    **more: Any,
) -> Path:
    """Train a run `folder/run` on rows that are kept in `folder/train.jsonl` and `folder/dev.jsonl`."""
    splits = {name: write_jsonl(folder / f"{name}.jsonl", labelled_rows(kind, n, seed)) for name, n, seed in SPLITS}
    more = {"schedule": Schedule(epochs=4, batch_size=8, lr=0.01), **more}
    request = TrainRequest(model=base, out=str(folder / "run"), task=KINDS[kind], method=method, **splits, **more)
    run_training(request, listener=report)
    return folder / "run"


# translation: letters are copied, and so is their number; learned in seconds

TRANSLATION_LETTERS = "abcdefgh"
TRANSLATION_SPLITS = (("train", 800, 0), ("dev", 60, 1))  # name, rows, seed
TRANSLATION_SHAPE = {
    "model_type": "marian",
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 24,
    "vocab_size": 300,
    "init_std": 0.15,
    "dropout": 0.0,
    "activation_function": "relu",
}


def translation_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return sentences of two to five letters whose translations are the same sentences."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(TRANSLATION_LETTERS, k=rng.randint(2, 5))) for _ in range(count)]
    return [{"src": text, "tgt": text} for text in texts]


def translation_config(folder: Path, **shape: Any) -> str:
    """Write the configuration of a tiny model that is trained from scratch."""
    path = folder / "tiny.json"
    path.write_text(json.dumps({**TRANSLATION_SHAPE, **shape}))
    return str(path)


def translation_run_folder(folder: Path, epochs: int = 5, method: str = "depth_adaptive", **options: Any) -> Path:
    """Train a run `folder/run` with its rows beside it; by default in one stage, labels not smoothed."""
    splits = {name: write_jsonl(folder / f"{name}.jsonl", translation_rows(n, s)) for name, n, s in TRANSLATION_SPLITS}
    if method == "depth_adaptive":
        options = {"together": True, "smoothing": 0.0, "tied": True, **options}  # tied heads learn in fewer steps
    schedule = Schedule(epochs=epochs, batch_size=16, lr=0.005, precision="fp32")
    about = {"task": "translation", "method": method, "options": options, "schedule": schedule}
    run_training(TrainRequest(model=translation_config(folder), out=str(folder / "run"), **about, **splits))
    return folder / "run"
