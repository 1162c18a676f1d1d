"""The toy language of the zoo models: vocabulary, sentences, facts and samples. This package does not import torch.

All data are generated without limit from seeds. `Stream(split, ...)` hashes the name of the split into its seed. Only training
documents use the split "train", so samples of other splits are held out by construction. Facts are the exception: a model can
know them from training only. For facts, the question is held out: its wording, the text around it, the wrong options and their
order.
"""
