"""The same laws with a real model: random weights, the zoo's shapes and tokenizer, real kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_run import _count, _wait_for_rows, table

from needlework.results import Store

HERE = Path(__file__).parent

PLAN = """
models: [griffin]
experiments:
  sweep:
    observe: true
    tasks:
      - {kind: niah, lengths: [48, 64], depths: [0, 50, 100], samples: 4, distractors: 1}
    interventions:
      - none
      - keep_heads(k={0, 2}, phase={'prefill', 'decode', 'both'})
      - "{none, expose_tokens('omit', phase='prefill')} + ablate_recurrent()"
      - swap_memory(half={'kv', 'recurrent'})
      - keep_heads(k=2, by='random', seed=0..1)
  ability:
    tasks:
      - {kind: cloze_choice, per_subject: 4}
      - {kind: perplexity, samples: 4, tokens: 48}
    interventions: [none, ablate_attention(), "keep_heads(k=2, by='random')"]
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from needlework.toy import tokenizer
    from needlework.training import recipes
    from needlework.training.train import build_model

    folder = tmp_path_factory.mktemp("live")
    recipe = recipes.find_recipe("tiny-griffin")
    small = {**recipe.config, "hidden_size": 32, "lru_width": 32, "intermediate_size": 64, "num_attention_heads": 4}
    build_model(recipe.model_copy(update={"config": small})).save_pretrained(folder / "griffin")
    tokenizer.build().save_pretrained(folder / "griffin")
    (folder / "plan.yaml").write_text(PLAN)
    return folder / "plan.yaml"


def start(plan: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "live.py"), str(plan), str(out)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.serial
def test_a_real_model_killed_five_times_gives_the_same_table(plan: Path, tmp_path: Path) -> None:
    assert start(plan, tmp_path / "whole").wait() == 0
    expected = table(tmp_path / "whole")
    assert not list(Store(tmp_path / "whole").rows("finish = 'failed'"))
    draw = random.Random(0)
    out = tmp_path / "out"
    counts = [0]
    for _ in range(5):
        process = start(plan, out)
        _wait_for_rows(out, process, counts[-1], seconds=120)
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        counts.append(_count(out))
    assert counts[1] < len(expected), "the first kill came too late to tell anything"
    assert counts == sorted(counts)
    assert start(plan, out).wait() == 0
    assert table(out) == expected
