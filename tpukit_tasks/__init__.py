"""The tasks of the notebooks, each a leaf: network, data, loss and scores. `leaves.py` has their names."""
