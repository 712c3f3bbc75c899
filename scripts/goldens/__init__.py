"""One module per family of golden data; `scripts/make_goldens.py` runs them."""
