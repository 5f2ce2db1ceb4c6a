"""Compressors make gradients smaller on the wire. They know tensors, and nothing of ranks."""

from phalanx.compression.compressor import Compressor
from phalanx.compression.error_feedback import ErrorFeedback
from phalanx.compression.power_sgd import PowerSGD
from phalanx.compression.quantized import Half, Quantized
from phalanx.compression.sparse import CompressedGradient
from phalanx.compression.top_k import RandomK, TopK, compress_gradients, decompress_gradients

TopKCompressor = TopK

__all__ = [
    "CompressedGradient",
    "Compressor",
    "ErrorFeedback",
    "Half",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "TopK",
    "TopKCompressor",
    "compress_gradients",
    "decompress_gradients",
]
