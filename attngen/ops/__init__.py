"""Ops: checking, allocating, launching."""

from attngen.ops.merge import merge_states
from attngen.ops.op import BuiltKernel, Op
from attngen.ops.ops import Ops

__all__ = ["BuiltKernel", "Op", "Ops", "merge_states"]
