"""Presets of retrieval tasks: lm-eval's own tasks on small files in the schema of their datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needlework import NeedleworkError
from needlework.analysis.reader import load as load_frame
from needlework.analysis.verdicts import verdicts
from needlework.lmeval.documents import load_tasks
from needlework.lmeval.evaluate import PRESET_ACTS, PRESETS
from needlework.results import Store
from needlework.toy.needles import make_niah
from needlework.toy.sample import Stream
from needlework.zoo import resolve

pytestmark = pytest.mark.slow
ZOO = "tiny-transformer"
SINGLE = {"fda": "hazyresearch/based-fda", "swde": "hazyresearch/based-swde-v2", "squad-completion": "hazyresearch/based-squad"}


def documents(count: int, words: int = 60) -> list[dict[str, str]]:
    """Texts that end before a value which stands in them: needles of the toy language."""
    found = []
    for i in range(count):
        sample = make_niah(Stream("test", i), context_tokens=words, relation="hideout", distractors=1)
        text, value = " ".join(sample.prompt), " ".join(sample.target)
        found.append({"doc_id": f"{i // 2}", "key": sample.key, "text": f"  {text} ", "value": f" {value} "})
    return found


def write(folder: Path, dataset: str, count: int = 6) -> Path:
    """Write the validation split as the hub's repository has it."""
    import pandas

    place = folder / Path(dataset).name / "data"
    place.mkdir(parents=True)
    pandas.DataFrame(documents(count)).to_parquet(place / "validation-00000-of-00001.parquet")
    return folder


def write_babilong(folder: Path, length: str = "0k") -> Path:
    import pandas

    place = folder / "RMT-team" / "babilong-1k-samples" / length
    place.mkdir(parents=True)
    for i in range(1, 6):
        docs = [
            {
                "input": d["text"].partition(" question :")[0],
                "question": f"where is the key of {d['key']} ?",
                "target": d["value"].strip(),
            }
            for d in documents(4, 40 + 10 * i)
        ]
        pandas.DataFrame(docs).to_parquet(place / f"qa{i}-00000-of-00001.parquet")
    return folder


def run(model: Path | str, out: Path, acts: list[str], **options: Any) -> Any:
    from needlework.lmeval.evaluate import evaluate

    return evaluate(model, [], acts, out, progress=False, **options)


def rows(out: Path) -> list[Any]:
    store = Store(out)
    found = list(store.rows())
    store.close()
    return found


@pytest.mark.parametrize("preset", SINGLE)
def test_answers_and_scores_are_those_of_lm_evals_own_model(preset: str, tmp_path: Path) -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    data = write(tmp_path / "data", SINGLE[preset])
    summary = run(ZOO, tmp_path / "out", ["none", "ablate_attention()"], preset=preset, data=data)
    (task,) = PRESETS[preset]
    lm = HFLM(pretrained=str(resolve(ZOO)), dtype="float32", device="cpu")
    its = evaluate(lm=lm, task_dict=load_tasks([task], data), bootstrap_iters=0, log_samples=True)
    stored = json.loads(summary.files[0].read_text())
    assert stored["results"][task]["contains,none"] == its["results"][task]["contains,none"] == 1.0
    samples = [json.loads(line) for line in (summary.files[0].parent / f"samples_{task}.jsonl").read_text().splitlines()]
    assert [s["resps"] for s in samples] == [s["resps"] for s in its["samples"][task]]
    found = [row for row in rows(tmp_path / "out") if row.intervention == "none"]
    assert [row.scores["correct"] for row in found] == [s["contains"] for s in its["samples"][task]]
    assert {row.ability for row in found} == {"retrieval"}
    assert {row.cluster for row in found} == {f"{task}/{i}" for i in range(3)}


def test_a_preset_asks_under_its_interventions_and_counts_what_they_did(tmp_path: Path) -> None:
    data = write(tmp_path / "data", SINGLE["fda"], 8)
    summary = run(ZOO, tmp_path / "out", [], preset="fda", data=data)
    shares = {line.intervention: line for line in summary.lines}
    assert list(shares) == list(PRESET_ACTS)
    assert (shares["none"].accuracy.value, shares["none"].accuracy.n) == (1.0, 8)
    assert shares["ablate_attention()"].raw.value == 0
    assert summary.failed == 0
    zeroed = {phase: shares_of(tmp_path / "out", f"ablate_attention(phase='{phase}')") for phase in ("prefill", "decode")}
    assert all(counts == {phase} for phase, counts in zeroed.items())
    frame = load_frame([tmp_path / "out"])
    judged = next(v for v in verdicts(frame) if v.claim == "segregation")
    assert judged.estimate.n == 8
    assert "Tasks: fda" in judged.sentence


def shares_of(out: Path, text: str) -> set[str]:
    """The phases in which receipts count zeroed heads."""
    receipts = [row.receipt for row in rows(out) if row.intervention == text]
    assert receipts
    return {layer["phase"] for receipt in receipts for layer in receipt["layers"] if layer.get("heads_zeroed")}


def test_babilong_at_a_length(tmp_path: Path) -> None:
    data = write_babilong(tmp_path / "data", "2k")
    summary = run(ZOO, tmp_path / "out", ["none"], preset="babilong", length="2k", data=data, limit=1, shots=0)
    assert summary.failed == 0
    assert [(line.name, line.accuracy.n) for line in summary.lines] == [("babilong_longctx", 5)]
    found = rows(tmp_path / "out")
    assert {row.ability for row in found} == {"retrieval"}
    assert all("acc" in row.scores and row.scores["correct"] == row.scores["acc"] for row in found)
    assert {row.task for row in found} == {f"babilong_qa{i}" for i in range(1, 6)}
    with pytest.raises(
        NeedleworkError, match=r"RMT-team/babilong-1k-samples \(4k\) cannot be loaded .*not in .*data either.*hf download"
    ):
        run(ZOO, tmp_path / "out", ["none"], preset="babilong", length="4k", data=data)


def test_what_is_wrong_is_said_before_the_model_is_loaded(griffin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import needlework.subject

    monkeypatch.setattr(needlework.subject, "load", lambda *a, **k: pytest.fail("the model was loaded"))
    data = write(tmp_path / "data", SINGLE["fda"])
    wrong: list[tuple[dict[str, Any], list[str], str]] = [
        ({"preset": "fdb"}, [], "did you mean 'fda'"),
        ({"preset": "fda", "length": "4k"}, [], "only the tasks of BABILong have lengths"),
        ({"preset": "swde"}, [], "hf download hazyresearch/based-swde-v2 --repo-type dataset --local-dir DIR/based-swde-v2"),
        ({"preset": "swde", "data": data}, [], "it is not in .*data either"),
        ({"preset": "fda", "data": data}, ["swap_memory(half='kv')"], "twin"),
    ]
    for options, acts, why in wrong:
        with pytest.raises(NeedleworkError, match=why):
            run(griffin, tmp_path / "out", acts, **options)


def test_interventions_that_a_model_has_no_parts_for_are_left_out_of_a_preset(tmp_path: Path) -> None:
    data = write(tmp_path / "data", SINGLE["fda"], 2)
    summary = run("tiny-mamba", tmp_path / "out", [], preset="fda", data=data)
    assert [line.intervention for line in summary.lines] == ["none"]
