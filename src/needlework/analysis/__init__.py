"""Select the trials that count, estimate shares with intervals, and judge the paper's claims. Does not import torch."""
