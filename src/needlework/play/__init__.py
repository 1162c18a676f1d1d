"""The playground: a page in the browser that switches parts of a model off and shows how the answer changes.

`server.py` serves it on loopback with a loaded model, `export.py` writes it as one file that needs no server. Both give the page
the same provider interface (`static/provider.js`).
"""
