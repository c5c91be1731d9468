"""Masks as pictures."""

import numpy as np


def test_a_mask_is_drawn_by_what_it_could_hold_so_that_all_true_is_white_and_all_false_black():
    from tpukit.reporting.figures import panels_figure

    full, half = np.ones((4, 4), bool), np.full((4, 4), 51, np.uint8)
    figure = panels_figure([[("all", full), ("none", ~full), ("grey", half)]], "masks")
    drawn = [axis.images[0].to_rgba(axis.images[0].get_array())[0, 0, 0] for axis in figure.axes]
    assert np.allclose(drawn, [1.0, 0.0, 0.2], atol=0.01)
