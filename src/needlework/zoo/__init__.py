"""The zoo: tiny models of the paper's architecture classes, trained on the toy language and shipped.

`needlework.toy` is their language, `needlework.training` makes them, `catalog()` lists them. Importing this package imports
neither torch nor transformers.
"""

from needlework.errors import ZooError
from needlework.zoo.shelf import Entry, catalog, names, path, resolve

__all__ = ["Entry", "ZooError", "catalog", "names", "path", "resolve"]
