"""The paper's second half: MMLU and GLUE with few heads kept, scored with the sparsification at every position."""

from __future__ import annotations

from needlework.anatomy import Anatomy, heads_of_share
from needlework.errors import NeedleworkError

KEPT = (0, 3, 4, 5, 32)
OF = 32  # heads of the paper's model
TASKS = ("mmlu", "glue")
TOY_TASKS = ("mini-mmlu", "mini-mmlu-cloze", "mini_mmlu_lookup", "mini-glue")
SHOTS = 5  # MMLU's own; the toy models have never seen examples in a row, and get none


def interventions(anatomy: Anatomy) -> list[str]:
    """The baseline, and k = 0, 3, 4, 5, 32 of 32 heads, or the same shares of this model's, in prefill and decode alike."""
    heads = min((part.query_heads for _, part in anatomy.attention_parts()), default=0)
    if not heads:
        raise NeedleworkError(f"--paper keeps attention heads, and {anatomy.architecture} has none; name interventions yourself")
    kept = dict.fromkeys(heads_of_share(k / OF, heads) for k in KEPT)
    return ["none", *(f"keep_heads(k={k})" for k in kept)]
