"""Data sets and the task streams made of them.

The table says what can be chosen by name: an options dataclass each, imported when it is chosen.
"""

BENCHMARKS = {
    "rotated-mnist": "cotrain.data.benchmarks:RotatedMnist",
    "permuted-mnist": "cotrain.data.benchmarks:PermutedMnist",
    "split-mnist": "cotrain.data.benchmarks:SplitMnist",
    "rotated-fashion-mnist": "cotrain.data.benchmarks:RotatedFashionMnist",
    "permuted-fashion-mnist": "cotrain.data.benchmarks:PermutedFashionMnist",
    "split-fashion-mnist": "cotrain.data.benchmarks:SplitFashionMnist",
    "arrays": "cotrain.data.benchmarks:Arrays",
}
