"""The tasks of the notebooks: networks, data, losses and scores. `tpukit/leaves.py` has their names; each can
be cut off."""
