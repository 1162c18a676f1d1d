"""A check before the first step: is the model causal, and can its card be made when it is trained?"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from needlework.errors import NeedleworkError, ZooError
from needlework.toy import tokenizer
from needlework.training import effects, evaluate
from needlework.training.recipes import Recipe

SEES_AHEAD = 1e-4  # of the largest logit: a hundred times what rounding does


def rehearse(recipe: Recipe, model: Any) -> None:
    """Do with the untrained model, on a few samples, all that follows the last step; its weights stay as they are."""
    from needlework.model.patches import fast_kernels

    try:
        with fast_kernels(model):
            _demand_causal(recipe, model)
            evaluate.figures(model, recipe.longest, 1)
        with TemporaryDirectory(prefix="needlework-") as place:
            model.save_pretrained(place)
            tokenizer.save(Path(place))
            effects.measure(Path(place), recipe.longest, per_depth=1, per_subject=1)
    except NeedleworkError:
        raise
    except Exception as error:  # any class of transformers may come here, and fail in its own way
        raise ZooError(
            f"recipe {recipe.name}: {recipe.architecture} with this config could be trained, but not measured afterwards "
            f"on prompts of up to {2 * recipe.longest} tokens ({type(error).__name__}: {error}); "
            "let it hold twice its longest document, or choose another class"
        ) from error


def _demand_causal(recipe: Recipe, model: Any) -> None:
    """A model that sees the word it has to predict would have perfect figures that mean nothing."""
    import torch

    was_training = model.training
    ids = torch.arange(10, 34)[None]
    other = ids.clone()
    other[0, -1] += 1
    with torch.inference_mode():
        model.eval()
        a, b = (model(input_ids=tokens, use_cache=False).logits[0, :-1] for tokens in (ids, other))
    model.train(was_training)
    if (a - b).abs().max() > SEES_AHEAD * a.abs().max():
        raise ZooError(
            f"recipe {recipe.name}: {recipe.architecture} with this config sees words that come later, so its figures would "
            "mean nothing; make it causal (many classes need `is_decoder: true` in config)"
        )
