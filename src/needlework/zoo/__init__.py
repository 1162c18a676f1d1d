"""The zoo: tiny models of the paper's architecture classes, trained on a toy language and shipped with the package.

`world` is the language, `recipes` say how a model is made, `train` makes it, `catalog()` lists what was made. Importing
this package imports neither torch nor transformers.
"""

from needlework.errors import ZooError
from needlework.zoo.shelf import Entry, catalog, names, path, resolve

__all__ = ["Entry", "ZooError", "catalog", "names", "path", "resolve"]
