"""Metrics against numbers worked by hand."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cotrain.metrics import (
    average_accuracy,
    backward_transfer,
    expert_overlap,
    forgetting,
    forward_transfer,
    learning_accuracy,
    summarise,
    task_similarity,
    used_experts,
)

NAN = float("nan")
FULL = np.array([[0.9, 0.2, 0.1], [0.6, 0.8, 0.3], [0.5, 0.7, 0.95]])
SEEN = np.where(np.tri(3), FULL, NAN)
INITIAL = np.array([0.15, 0.1, 0.05])
IMPROVED = np.array([[0.5, NAN, NAN], [0.9, 0.6, NAN], [0.7, 0.8, 0.4]])
JOINT = np.array([[0.9, 0.7, 0.8]])

shares = st.floats(0, 1).map(lambda share: round(share, 3))
matrices = st.integers(2, 6).flatmap(lambda tasks: hnp.arrays(float, (tasks, tasks), elements=shares))


def near(value):
    return pytest.approx(value, rel=0, abs=1e-12)


@pytest.mark.parametrize("accuracy", [FULL, SEEN], ids=["all tasks", "seen tasks"])
def test_by_hand(accuracy):
    assert average_accuracy(accuracy) == near((0.5 + 0.7 + 0.95) / 3)
    assert backward_transfer(accuracy) == near(((0.5 - 0.9) + (0.7 - 0.8)) / 2)
    assert forgetting(accuracy) == near(((0.9 - 0.5) + (0.8 - 0.7)) / 2)
    assert learning_accuracy(accuracy) == near((0.9 + 0.8 + 0.95) / 3)


def test_forward_transfer_by_hand():
    assert forward_transfer(FULL, INITIAL) == near(((0.2 - 0.1) + (0.3 - 0.05)) / 2)
    assert math.isnan(forward_transfer(SEEN, INITIAL))
    assert math.isnan(forward_transfer(FULL, np.full(3, NAN)))


def test_forgetting_counts_from_the_best_and_backward_transfer_from_the_first():
    assert backward_transfer(IMPROVED) == near((0.2 + 0.2) / 2)
    assert forgetting(IMPROVED) == near((0.2 + -0.2) / 2)


def test_the_best_may_come_before_a_task_is_learned_but_not_after_the_last():
    accuracy = np.array([[0.5, 0.9, 0.1], [0.5, 0.6, 0.1], [0.8, 0.7, 0.1]])
    assert forgetting(accuracy) == near(((0.5 - 0.8) + (0.9 - 0.7)) / 2)


def test_one_task_has_nothing_to_transfer():
    accuracy = np.array([[0.75]])
    assert average_accuracy(accuracy) == learning_accuracy(accuracy) == 0.75
    assert math.isnan(backward_transfer(accuracy))
    assert math.isnan(forgetting(accuracy))
    assert math.isnan(forward_transfer(accuracy, np.array([0.1])))


def test_tasks_learned_all_at_once_are_neither_earlier_nor_later():
    assert average_accuracy(JOINT) == near(0.8)
    assert math.isnan(forgetting(JOINT))


def test_tasks_learned_all_at_once_have_no_backward_transfer():
    assert math.isnan(backward_transfer(JOINT))


def test_tasks_learned_all_at_once_have_no_forward_transfer():
    assert math.isnan(forward_transfer(JOINT, np.array([0.1, 0.1, 0.1])))


def test_tasks_learned_all_at_once_were_all_learned_just_now():
    assert learning_accuracy(JOINT) == near(0.8)


@given(matrices)
def test_forgetting_is_negative_backward_transfer_when_tasks_are_best_right_after_learning(accuracy):
    best = np.diagonal(accuracy)
    accuracy = np.minimum(accuracy, best[None, :])
    assert forgetting(accuracy) == near(-backward_transfer(accuracy))


@given(matrices)
def test_forgetting_is_at_least_negative_backward_transfer(accuracy):
    assert forgetting(accuracy) >= -backward_transfer(accuracy) - 1e-12


@given(matrices)
def test_accuracy_is_learning_accuracy_plus_backward_transfer(accuracy):
    tasks = len(accuracy)
    change = backward_transfer(accuracy) * (tasks - 1) / tasks
    assert average_accuracy(accuracy) == near(learning_accuracy(accuracy) + change)


@given(matrices, st.floats(-1, 1))
def test_transfer_is_a_difference(accuracy, shift):
    assert backward_transfer(accuracy + shift) == near(backward_transfer(accuracy))
    assert forgetting(accuracy + shift) == near(forgetting(accuracy))
    initial = accuracy[0]
    assert forward_transfer(accuracy + shift, initial + shift) == near(forward_transfer(accuracy, initial))


def test_a_summary_by_hand():
    summary = summarise(np.array([0.8, 0.9, 1.0]))
    margin = 4.302652729911275 * 0.1 / math.sqrt(3)  # the 97.5 % quantile of Student's t with two degrees of freedom
    assert summary.mean == near(0.9)
    assert summary.std == near(0.1)
    assert summary.low == pytest.approx(0.9 - margin, abs=1e-9)
    assert summary.high == pytest.approx(0.9 + margin, abs=1e-9)
    assert summary.seeds == 3


def test_a_summary_at_another_confidence():
    summary = summarise(np.array([1.0, 3.0]), confidence=0.5)
    assert (summary.low, summary.high) == (near(1.0), near(3.0))  # t = 1 at one degree of freedom; 1 · √2 / √2


def test_one_seed_has_no_spread():
    summary = summarise(np.array([0.8]))
    assert summary.mean == 0.8
    assert summary.seeds == 1
    assert all(math.isnan(value) for value in (summary.std, summary.low, summary.high))


@given(hnp.arrays(float, st.integers(2, 12), elements=st.floats(-10, 10)), st.floats(0.5, 0.999))
def test_a_summary_agrees_with_scipy(values, confidence):
    assume(np.ptp(values) > 1e-3)
    summary = summarise(values, confidence)
    result = scipy.stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert (summary.low, summary.high) == (pytest.approx(result.low), pytest.approx(result.high))
    assert summary.std == pytest.approx(scipy.stats.tstd(values))


GATES = np.array([[0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0], [0.5, 0.5, 0, 0]])


def test_similarity_by_hand():
    expected = [[0.5, 0.125, 0.5], [0.125, 0.625, 0.125], [0.5, 0.125, 0.5]]
    np.testing.assert_allclose(task_similarity(GATES), expected, rtol=0, atol=1e-12)


def test_overlap_by_hand():
    np.testing.assert_allclose(expert_overlap(GATES), [[1, 0.5, 1], [0.5, 1, 0.5], [1, 0.5, 1]], rtol=0, atol=1e-12)
    uneven = np.array([[1.0, 0, 0], [0.2, 0.3, 0.5]])
    np.testing.assert_allclose(expert_overlap(uneven), [[1, 1], [1 / 3, 1]], rtol=0, atol=1e-12)


def test_used_experts_by_hand():
    moved = GATES[[1, 1, 2]]  # task 0 changes its route when task 1 is learned
    used = used_experts(np.stack([GATES, moved, moved]))
    np.testing.assert_array_equal(used, [[1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 0]])


def test_used_experts_of_tasks_learned_all_at_once_are_those_of_every_task():
    np.testing.assert_array_equal(used_experts(GATES[None]), [[1, 1, 1, 0]])
