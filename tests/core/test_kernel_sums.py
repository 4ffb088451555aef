"""Codes of kernels whose errors cancel."""

from __future__ import annotations

import itertools

import numpy as np

from quark.core.solvers.kernel_sums import balance_sums

INT8 = (-128.0, 127.0)


def test_the_codes_are_the_best_of_all_that_keep_the_sum() -> None:
    exact = np.random.default_rng(0).normal(0, 40, (20, 9))
    nearest = np.rint(exact).astype(np.int8)
    codes = balance_sums(nearest, exact, INT8)
    assert codes.dtype == np.int8 and (codes != nearest).any()
    for kernel, found in zip(exact, codes, strict=True):
        choices = np.floor(kernel) + np.array(list(itertools.product((0, 1), repeat=9)))
        fair = choices[np.abs((choices - kernel).sum(1)) <= 0.5]
        best = fair[((fair - kernel) ** 2).sum(1).argmin()]
        assert (found == best).all()


def test_what_cancels_already_and_what_has_no_room_stays() -> None:
    exact = np.array([[0.25, 0.75, -0.25, -0.75], [127.4, 127.4, 127.4, 127.4], [-130.0, -130.0, 0.4, 0.4]])
    nearest = np.clip(np.rint(exact), *INT8)
    assert (balance_sums(nearest, exact, INT8) == [[0, 1, 0, -1], [127] * 4, [-128, -128, 0, 0]]).all()
