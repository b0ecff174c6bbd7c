"""One package per third-party library that mmzero adapts to.

These are the only importers of those libraries (``tests/test_layering.py`` says which). Everything
else in mmzero imports an integration lazily, inside the function that needs it, so that
``import mmzero`` works without any of them.
"""
