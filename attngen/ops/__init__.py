"""Ops: checking, allocating, launching."""

from attngen.ops.block_lists import block_matrix
from attngen.ops.merge import merge_states
from attngen.ops.op import BuiltKernel, Op
from attngen.ops.ops import Ops

__all__ = ["BuiltKernel", "Op", "Ops", "block_matrix", "merge_states"]
