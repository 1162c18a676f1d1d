"""Public names of the interventions: ablations, masks, state resets and cache swaps. Does not import torch."""

from needlework.interventions.acts import ChangeOutputs, head_score, known_scores
from needlework.interventions.base import NONE, Intervention, Part, as_intervention, parse, register, registered
from needlework.interventions.builtin import (
    AblateAttention,
    AblateHeads,
    AblateRecurrent,
    AblateRecurrentGroups,
    BlockAttention,
    BlockRecurrent,
    ExposeTokens,
    KeepHeads,
    LimitContext,
    OnlyHeads,
    ResetState,
    SwapMemory,
)
from needlework.interventions.ranking import Ranking

__all__ = [
    "NONE",
    "AblateAttention",
    "AblateHeads",
    "AblateRecurrent",
    "AblateRecurrentGroups",
    "BlockAttention",
    "BlockRecurrent",
    "ChangeOutputs",
    "ExposeTokens",
    "Intervention",
    "KeepHeads",
    "LimitContext",
    "OnlyHeads",
    "Part",
    "Ranking",
    "ResetState",
    "SwapMemory",
    "as_intervention",
    "head_score",
    "known_scores",
    "parse",
    "register",
    "registered",
]
