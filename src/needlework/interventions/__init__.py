"""Public names of the interventions: ablations, masks, state resets and cache swaps. Does not import torch."""

from needlework.interventions.acts import ChangeOutputs as ChangeOutputs
from needlework.interventions.acts import head_score as head_score
from needlework.interventions.acts import known_scores as known_scores
from needlework.interventions.base import NONE as NONE
from needlework.interventions.base import Intervention as Intervention
from needlework.interventions.base import Part as Part
from needlework.interventions.base import as_intervention as as_intervention
from needlework.interventions.base import parse as parse
from needlework.interventions.base import register as register
from needlework.interventions.base import registered as registered
from needlework.interventions.builtin import AblateAttention as AblateAttention
from needlework.interventions.builtin import AblateHeads as AblateHeads
from needlework.interventions.builtin import AblateRecurrent as AblateRecurrent
from needlework.interventions.builtin import AblateRecurrentGroups as AblateRecurrentGroups
from needlework.interventions.builtin import BlockAttention as BlockAttention
from needlework.interventions.builtin import BlockRecurrent as BlockRecurrent
from needlework.interventions.builtin import ExposeTokens as ExposeTokens
from needlework.interventions.builtin import KeepHeads as KeepHeads
from needlework.interventions.builtin import LimitContext as LimitContext
from needlework.interventions.builtin import OnlyHeads as OnlyHeads
from needlework.interventions.builtin import ResetState as ResetState
from needlework.interventions.builtin import SwapMemory as SwapMemory
from needlework.interventions.ranking import Ranking as Ranking
