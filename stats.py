"""Bootstrap intervals and tables for the studies. The unit that is resampled is an answer (a response), never a token: tokens
of one answer share a prompt, an advantage and a drift, and an interval over tokens would be too narrow."""

import torch


def resamples(n, draws=2000, seed=0):
    """(draws, n) int64 indices of answers drawn with replacement, from an own generator."""
    return torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(seed))


def interval(values, level=0.95):
    """(low, high) percentiles of bootstrap values, a float tensor (draws,); NaN values (an empty draw) are left out."""
    values = values[~values.isnan()].double().sort().values
    if not len(values):
        return float("nan"), float("nan")
    tail = round((1 - level) / 2 * (len(values) - 1))
    return values[tail].item(), values[len(values) - 1 - tail].item()


def ratio_of_sums(top, bottom, draws=2000, seed=0):
    """(ratio, low, high) of sum(top) / sum(bottom); top, bottom: (answers,) sums per answer, resampled together."""
    top, bottom = top.double(), bottom.double()
    index = resamples(len(top), draws, seed)
    return (top.sum() / bottom.sum()).item(), *interval(top[index].sum(1) / bottom[index].sum(1))


def markdown(rows):
    """Rows (dicts with the same keys) as a markdown table; floats with four significant digits."""
    def cell(x):
        return f"{x:.4g}" if isinstance(x, float) else str(x)

    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *[[cell(row[k]) for k in keys] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
