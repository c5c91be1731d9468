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


def verdict(scores: dict) -> str:
    """Return a sentence if there were predictions that are not finite, or "". scores: of a run's record,
    in which anybody may have written."""
    bad = scores.get("not_finite")
    if isinstance(bad, int) and bad:
        return f"{bad} predictions are NaN or infinite: train with a lower learning rate, or in fp32."
    return ""
