"""Predictions of networks that diverged, or that do not fit their weights."""

import numpy as np

from tpukit.host.errors import TpukitError


def require_finite(predictions: object) -> None:
    """Raise TpukitError if a prediction for a user's own file has NaN or infinite numbers."""
    if bad := int(np.count_nonzero(~np.isfinite(np.asarray(predictions)))):
        raise TpukitError(
            f"the network gave {bad} numbers that are NaN or infinite, so it says nothing: the weights"
            " diverged, or are no match for these settings; use other weights, or precision='fp32'"
        )
