"""Results as arrays to train on. NumPy alone; ``torch.from_numpy`` takes every writable array here without a warning.

``to_arrays`` turns one trace into aligned arrays, ``collate`` several rollouts into a padded batch, ``pack`` into rows of
concatenated sequences; ``to_response`` gives the reference's dictionary. All take a bare ``Result`` as well as what the
reader yields.
"""

from freezepoint.training.arrays import UNKNOWN_VERSION, TraceArrays, find_trace, to_arrays, to_response
from freezepoint.training.batches import PaddedBatch, collate
from freezepoint.training.delivery import ALL_TRACES, SINGLE_RESPONSE, DeliveryName, View, view
from freezepoint.training.packing import PackedBatch, pack
from freezepoint.training.rows import Cut, Sample

__all__ = [
    "ALL_TRACES",
    "SINGLE_RESPONSE",
    "UNKNOWN_VERSION",
    "Cut",
    "DeliveryName",
    "PackedBatch",
    "PaddedBatch",
    "Sample",
    "TraceArrays",
    "View",
    "collate",
    "find_trace",
    "pack",
    "to_arrays",
    "to_response",
    "view",
]
