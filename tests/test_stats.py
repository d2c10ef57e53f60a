"""Bootstrap over answers and markdown tables."""

import math

import pytest
import torch

import stats


def test_resamples_are_reproducible_and_in_range():
    index = stats.resamples(7, draws=50, seed=3)
    assert index.shape == (50, 7) and index.min() == 0 and index.max() == 6
    assert torch.equal(index, stats.resamples(7, draws=50, seed=3))
    assert not torch.equal(index, stats.resamples(7, draws=50, seed=4))


def test_interval_is_the_middle_part():
    values = torch.arange(1001.0)[torch.randperm(1001, generator=torch.Generator().manual_seed(0))]
    assert stats.interval(values, 0.95) == (25.0, 975.0)
    assert stats.interval(torch.tensor([3.0, float("nan"), 1.0, 2.0]), 1.0) == (1.0, 3.0)
    assert all(math.isnan(x) for x in stats.interval(torch.full((3,), float("nan"))))


def test_ratio_of_sums_by_hand_and_its_coverage():
    ratio, low, high = stats.ratio_of_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0]))
    assert (ratio, low, high) == (0.5, 0.5, 0.5)  # every answer has the same ratio: no spread
    assert stats.ratio_of_sums(torch.tensor([1.0, 9.0]), torch.tensor([1.0, 1.0]))[1:] == (1.0, 9.0)
    generator, inside = torch.Generator().manual_seed(0), 0
    for k in range(100):
        bottom = torch.rand(60, generator=generator) + 0.5
        top = bottom * 0.8 + 0.3 * torch.randn(60, generator=generator)
        _, low, high = stats.ratio_of_sums(top, bottom, draws=400, seed=k)
        inside += low <= 0.8 <= high
    assert 88 <= inside <= 100  # nominally 95


def test_markdown():
    assert stats.markdown([{"a": 1, "b": 0.123456}, {"a": "x", "b": 2.0}]) == (
        "| a | b |\n| --- | --- |\n| 1 | 0.1235 |\n| x | 2 |"
    )
    with pytest.raises(IndexError):
        stats.markdown([])
