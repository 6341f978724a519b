"""Which ops of which specs a call runs."""

from __future__ import annotations

from attngen.ops.mixed import prefix_specs
from attngen.ops.sparse import gathering_spec
from attngen.signature import CallName, OpName
from attngen.spec import AttentionSpec
from attngen.variant import normalize


def parts(spec: AttentionSpec, call: CallName) -> tuple[tuple[AttentionSpec, OpName], ...]:
    """Specs and their ops: for ``prefix`` that of the cache and that of the new keys, for ``listed`` that of gathered keys.

    Raises:
        UnsupportedError: the spec has no such call.
    """
    if call == "prefix":
        return tuple((part, "prefill") for part in prefix_specs(spec, normalize(spec, "prefill")))
    if call == "listed":
        return ((gathering_spec(spec, normalize(spec, "decode")), "decode"),)
    return ((spec, call),)
