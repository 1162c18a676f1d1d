"""MMLU's real shape: lm-eval's own template, five shots of the subject, four letters; plain, and in turns of a chat."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from needlework.toy.words import SPECIAL, VOCABULARY

pytestmark = pytest.mark.slow
WORDS = [word for word in VOCABULARY if word not in SPECIAL]
SUBJECTS = {"anatomy": 4, "world_religions": 9}  # words of the shortest question
SHOTS, QUESTIONS = 5, 3
ACTS = {"none": None, "keep_heads(k=1)": 1, "keep_heads(k=4)": None}  # of four heads
TASK = """\
include: {template}
task: mmlu_{subject}
dataset_name: {subject}
description: "The following are multiple choice questions (with answers) about {subject}.\\n\\n"
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mmlu")
    lm_eval = importlib.util.find_spec("lm_eval")
    assert lm_eval is not None
    template = Path(str(lm_eval.origin)).parent / "tasks/mmlu/default/_default_template_yaml"
    words = iter(WORDS * 20)
    for subject, shortest in SUBJECTS.items():
        (folder / f"{subject}.yaml").write_text(TASK.format(template=template, subject=subject))
        for split, count in (("dev", SHOTS), ("test", QUESTIONS)):
            (folder / split).mkdir(exist_ok=True)
            with (folder / split / f"{subject}_{split}.csv").open("w", newline="") as file:
                for i in range(count):
                    texts = [" ".join(next(words) for _ in range(n)) for n in (shortest + 3 * i, 1, 2, 1, 1 + i)]
                    csv.writer(file).writerow([*texts, "ABCD"[i % 4]])
    return folder


def keep_best(k: int | None) -> Any:
    """transformers' eager attention, with all but the k heads of least entropy silenced at every token."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, Any]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(2, 3) * scaling
        weights = (logits + mask[..., : key.shape[2]]).softmax(-1)
        out = weights @ value
        if k is not None:
            entropy = -torch.special.xlogy(weights, weights).sum(-1)
            best = entropy.sort(dim=1, stable=True).indices[:, :k]
            out = out * torch.zeros_like(entropy).scatter_(1, best, 1.0)[..., None]
        return out.transpose(1, 2).contiguous(), weights

    return attention


def hf(model: Path, archive: Path, k: int | None, chat: bool) -> dict[str, list[Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    from needlework.lmeval.documents import silence_lm_eval, use_local_data

    AttentionInterface.register("keep_best", keep_best(k))
    AttentionMaskInterface.register("keep_best", eager_mask)
    with silence_lm_eval(), use_local_data(archive):
        lm = HFLM(str(model), device="cpu", dtype="float32", batch_size=4, attn_implementation="keep_best")
        found = simple_evaluate(
            lm,
            tasks=[str(archive / f"{subject}.yaml") for subject in SUBJECTS],
            task_manager=TaskManager(include_defaults=False),
            num_fewshot=SHOTS,
            bootstrap_iters=0,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    samples: dict[str, list[Any]] = found["samples"]
    return samples


@pytest.mark.parametrize(("name", "chat"), [("griffin", False), ("griffin", True), ("jamba", False), ("llama", False)])
def test_log_likelihoods_are_those_of_hf(
    name: str, chat: bool, archive: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    from needlework.engine import budget
    from needlework.engine.prefill import Prefiller
    from needlework.lmeval.evaluate import evaluate

    model: Path = request.getfixturevalue(name)
    monkeypatch.setattr(budget, "_FORWARD_FLOPS", {"cpu": 1e5})  # these models are so small that no stem would pay
    stems: list[int] = []
    stock = Prefiller._fill_prefixes

    def read_stems(self: Prefiller, some: Any) -> None:
        stems.extend(len(stem.tokens) for stem in some if stem not in self._kept)
        stock(self, some)

    monkeypatch.setattr(Prefiller, "_fill_prefixes", read_stems)
    tasks = [str(archive / f"{subject}.yaml") for subject in SUBJECTS]
    found = evaluate(model, tasks, list(ACTS), tmp_path, data=archive, shots=SHOTS, chat=chat, progress=False)
    its = {k: hf(model, archive, k, chat) for k in set(ACTS.values())}
    for file, k in zip(found.files, ACTS.values(), strict=True):
        for task, samples in its[k].items():
            mine = [json.loads(line) for line in (file.parent / f"samples_{task}.jsonl").read_text().splitlines()]
            assert len(mine) == len(samples) == QUESTIONS
            for a, b in zip(mine, samples, strict=True):
                assert [r[0][0] for r in a["resps"]] == pytest.approx([r[0][0] for r in b["resps"]], abs=1e-4)
                assert a["acc"] == b["acc"]
    long = [tokens for tokens in stems if tokens > 40]
    assert len(long) == 2 * len(SUBJECTS), "the shots of each subject are read once under each of two interventions"
