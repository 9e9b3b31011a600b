"""Peers return the logits of Offramp's full model, on every backbone that they support."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offramp import methods, tasks
from offramp.engines.openvino import runtime as _runtime
from offramp.errors import OfframpError
from offramp.evaluation import peers
from offramp.evaluation.peers import BenchModel, EngineVariant
from offramp.evaluation.plain_model import pad_batch, unpad_logits
from offramp.inference.predictor import Predictor
from offramp.inference.run_folder import LoadedRun, build_network, load_run, quiet_transformers, save_run
from tests.factories import AUTO_CLASSES, BACKBONES, KINDS, hf_model, labelled_rows, wordpiece_tokenizer

NO_SDPA = {"alberta", "deberta-v2", "mpnet"}  # relative positions: transformers has eager attention only


def folder(path: Path, backbone: str, kind: str = "classification") -> Path:
    """Write an untrained run of the full model."""
    tokenizer, method = wordpiece_tokenizer(), methods.get("full")
    task = tasks.get(KINDS[kind]).from_rows(labelled_rows(kind, 8), "rows")
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    with quiet_transformers():
        model = hf_model(backbone, AUTO_CLASSES[kind], **{**shape, **task.config()})
    net = build_network(model, task, method, method.options())
    save_run(path, LoadedRun(net, tokenizer, method, method.options(), 60, "tiny"))
    return path


def both(run: Path, peer: str, variant: EngineVariant, kind: str = "classification") -> tuple[list[Any], list[Any]]:
    """Return the logits of a ragged batch from the full model and from a peer."""
    predictor = Predictor(load_run(run), engine="torch")
    rows = predictor.prepare(labelled_rows(kind, 5, 1))
    model = BenchModel(str(run), predictor.task.auto_class, str(run), 1, tuple(rows))
    logits = peers.get(peer).load(model, variant)(rows)
    assert len({len(row.ids) for row in rows}) > 1
    return predictor.run(rows, predictor.settings(1.0)).logits, logits


def close(pair: tuple[list[Any], list[Any]], atol: float = 1e-4) -> bool:
    return all(a.shape == b.shape and np.allclose(a, b, atol=atol) for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("engine", ["hf-eager", "hf-sdpa"])
def test_hugging_face_equals_the_full_model(tmp_path: Path, backbone: str, engine: str) -> None:
    run = folder(tmp_path, backbone)
    if engine == "hf-sdpa" and backbone in NO_SDPA:
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            both(run, "hf", EngineVariant(engine, "fp32"))
    else:
        assert close(both(run, "hf", EngineVariant(engine, "fp32")))


@pytest.mark.parametrize("kind", ["tagging", "question_answering", "regression"])
def test_every_kind_of_logits_equals_the_full_model(tmp_path: Path, kind: str) -> None:
    assert close(both(folder(tmp_path, "bert", kind), "hf", EngineVariant("hf-sdpa", "fp32"), kind))


def test_bfloat16_is_close(tmp_path: Path) -> None:
    pair = both(folder(tmp_path, "bert"), "hf", EngineVariant("hf-sdpa", "bf16"))
    assert not close(pair) and close(pair, 0.5)


@pytest.mark.parametrize("backbone", ["bert", "distilbert"])  # with token types, and without
def test_compiled_graphs_equal_the_full_model(
    tmp_path: Path, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder(tmp_path, backbone)
    assert close(both(run, "onnxruntime", EngineVariant("onnxruntime", "fp32")))
    assert close(both(run, "openvino", EngineVariant("openvino-graph", "fp32")))
    if backbone == "bert":
        int8 = both(run, "onnxruntime", EngineVariant("onnxruntime", "int8"))
        assert not close(int8) and close(int8, 1.0)
        assert close(both(run, "openvino", EngineVariant("openvino-graph", "bf16")), 0.5)
        capsys.readouterr()
        int8 = both(run, "openvino", EngineVariant("openvino-graph", "int8"))
        assert not close(int8) and close(int8, 1.0)
        assert capsys.readouterr() == ("", "")  # NNCF has progress bars


@pytest.mark.parametrize("backbone", ["bert", "roberta", "distilbert"])
def test_ctranslate2_equals_the_full_model(tmp_path: Path, backbone: str) -> None:
    run = folder(tmp_path, backbone)
    assert close(both(run, "ctranslate2", EngineVariant("ctranslate2", "fp32")))
    int8 = both(run, "ctranslate2", EngineVariant("ctranslate2", "int8"))
    assert not close(int8) and close(int8, 1.0)


@pytest.mark.parametrize("kind", ["tagging", "question_answering"])
def test_ctranslate2_has_logits_for_every_token(tmp_path: Path, kind: str) -> None:
    assert close(both(folder(tmp_path, "bert", kind), "ctranslate2", EngineVariant("ctranslate2", "fp32"), kind))


def test_ctranslate2_refuses_families_that_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(OfframpError, match=r"(?s)bert, distilbert, roberta.*electra"):
        both(folder(tmp_path, "electra"), "ctranslate2", EngineVariant("ctranslate2", "fp32"))


def test_static_int8_needs_sample_rows(tmp_path: Path) -> None:
    run = folder(tmp_path, "bert")
    model = BenchModel(str(run), "AutoModelForSequenceClassification", str(run), 1)
    with pytest.raises(OfframpError, match="no sample rows"):
        peers.get("openvino").load(model, EngineVariant("openvino-graph", "int8"))


def test_hf_compile_compiles_the_plain_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_nothing(model: Any, dynamic: bool) -> Any:  # the real one takes a compiler and a minute
        compiled.append(dynamic)
        return model

    monkeypatch.setattr(torch, "compile", compile_nothing)
    assert close(both(folder(tmp_path, "bert"), "hf-compile", EngineVariant("hf-compile", "fp32"))) and compiled == [
        True
    ]


@pytest.mark.parametrize(
    "package, peer", [("onnxruntime", "onnxruntime"), ("onnx", "onnxruntime"), ("openvino",) * 2, ("ctranslate2",) * 2]
)
def test_missing_package_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch, package: str, peer: str) -> None:
    _runtime.import_openvino.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OfframpError, match=rf"'{package}' is not installed"):
        peers.get(peer).load(BenchModel("nowhere", "AutoModel", "nowhere", 1), peers.get(peer).variants[0])


def test_openvino_telemetry_is_not_imported(tmp_path: Path) -> None:
    """The telemetry module is absent while OpenVINO is imported, so its converter uses the stub."""
    run = str(folder(tmp_path, "bert"))
    script = f"""
import sys
from offramp.evaluation import peers
peers.get("openvino").load(peers.BenchModel({run!r}, "AutoModelForSequenceClassification", {run!r}, 1),
                           peers.EngineVariant("openvino-graph", "fp32"))
from openvino.tools.ovc import convert_impl, telemetry_utils
print(convert_impl.tm.__name__, telemetry_utils.tm.__name__, "openvino_telemetry" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    stub = "openvino.tools.ovc.telemetry_stub"
    assert done.stdout.split() == [stub, stub, "False"] and (tmp_path / "graph.xml").is_file(), done.stderr


def test_peer_files_are_the_list() -> None:
    assert peers.names() == ["ctranslate2", "hf", "hf-compile", "onnxruntime", "openvino"]
    with pytest.raises(OfframpError, match="ctranslate2, hf, hf-compile"):
        peers.get("tensorflow")


def test_pad_batch_and_unpad_logits(tmp_path: Path) -> None:
    rows = Predictor(load_run(folder(tmp_path, "bert")), engine="torch").prepare([{"text": "a film"}, {"text": "good"}])
    padded = pad_batch(rows, 9)
    assert padded["ids"][1].tolist() == [*rows[1].ids, 9] and padded["mask"].tolist() == [[1] * 4, [1, 1, 1, 0]]
    parts = unpad_logits(np.arange(16).reshape(2, 4, 2), rows)
    assert [part.shape for part in parts] == [(4, 2), (3, 2)]
