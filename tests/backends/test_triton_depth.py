"""No product of tiles has fewer terms than Triton gives the threads of a row."""

from __future__ import annotations

import pytest

import attngen as ag
from attngen.schedule.reading import smallest_depth
from attngen.target import Target
from attngen.variant import normalize
from tests.backends.products import SPECS
from tests.backends.triton_kernels import run_python

SHALLOW = "import sys; from tests.backends.products import shallow; print(*shallow(*sys.argv[1:]), sep='\\n')"


@pytest.mark.triton_compile
@pytest.mark.parametrize(("name", "target"), [*((name, "cuda:sm86") for name in SPECS), ("nvfp4", "cuda:sm90a")])
def test_threads_hold_no_term_twice(name: str, target: str) -> None:
    (products,) = run_python(SHALLOW, name, target).strip().splitlines()
    assert int(products.split()[0]) > 0


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"dtype": "nvfp4"}, 32),
        ({"dtype": "mxfp4"}, 32),
        ({"dtype": "int4", "zero_point": True}, 32),
        ({"dtype": "int4"}, 16),  # words with scales of 16 bits
        ({"dtype": "fp8_e4m3"}, 16),
        ({}, 16),
    ],
)
def test_only_joined_bytes_need_more_terms(fields: dict[str, object], keys: int) -> None:
    spec = ag.AttentionSpec(heads=ag.MHA(4, 128), kv=ag.Paged(page_size=16, **fields), dtype="bf16")
    assert smallest_depth(normalize(spec, "decode"), "keys", Target.parse("cuda:sm90a")) == keys
    assert smallest_depth(normalize(spec, "decode"), "keys", Target.parse("hip:gfx942")) == 16
    plain = spec.model_copy(update={"dtype": "fp32"})
    assert smallest_depth(normalize(plain, "decode"), "keys", Target.parse("cuda:sm90a")) == 16
