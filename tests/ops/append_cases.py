"""Writes into caches of every storage and layout, each compared with :func:`attngen.dtypes.quantize` byte by byte.

``TRITON_INTERPRET=1 python -m tests.ops.append_cases`` runs them through Triton's interpreter and prints those that fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import attngen as ag
from attngen.dtypes import Storage, quantize
from attngen.ops.checks import torch_dtype

TOKENS, PAGES, PAGE, BATCH, LEN = 23, 7, 8, 3, 19
GQA = ag.GQA(num_qo_heads=6, num_kv_heads=3, head_dim=64)
WIDE = ag.GQA(num_qo_heads=2, num_kv_heads=2, head_dim=64, head_dim_vo=96)
LATENT = ag.MLA(num_qo_heads=2, head_dim_ckv=96, head_dim_kpe=32)
# Every dtype with every factor that it has.
STORED: list[dict[str, Any]] = [
    {},
    {"dtype": "fp16"},
    {"dtype": "fp32"},
    *(
        {"dtype": name, "scale": scale}
        for name in ("fp8_e4m3", "fp8_e5m2", "int8")
        for scale in ("tensor", "head", "token")
    ),
    {"dtype": "int4"},
    {"dtype": "int4", "group_size": 64, "scale": "tensor"},
    {"dtype": "int4", "zero_point": True},
    {"dtype": "nvfp4"},
    {"dtype": "mxfp4"},
    {"dtype": "mxfp4", "scale": "tensor"},
    {"k_dtype": "int8", "v_dtype": "int4"},
    {"k_dtype": "nvfp4", "v_dtype": "mxfp4"},
]
LAYOUTS: list[tuple[type, dict[str, Any], bool]] = [
    (ag.Paged, {"page_size": PAGE}, False),
    (ag.Paged, {"page_size": PAGE, "layout": "HND"}, True),
    (ag.Paged, {"page_size": PAGE, "stack_dim": 0}, True),
    (ag.Contiguous, {}, False),
    (ag.Ragged, {}, False),
]


@dataclass(frozen=True)
class Case:
    """One call: ``stacked`` (of MLA: joined) keys and values, tokens placed by ``slots`` or by positions, or by CSR pages."""

    spec: ag.AttentionSpec
    stacked: bool
    place: str

    @property
    def name(self) -> str:
        kv = self.spec.kv
        fields = kv.model_dump(exclude_defaults=True, exclude={"page_size"})
        words = [self.spec.heads.kind, kv.kind, *(f"{v}" for v in fields.values()), self.spec.dtype, self.place]
        return "-".join(words + (["stacked"] if self.stacked else []))


def cases(dtype: str) -> list[Case]:
    """Every storage in a paged cache by slots, every layout by positions, and latents."""
    found = []
    for number, stored in enumerate(STORED):
        plain = stored.get("dtype") in (None, dtype)
        heads = GQA if "group_size" in stored or plain else WIDE
        for index, (kind, fields, stacked) in enumerate(LAYOUTS):
            same = heads is GQA and "k_dtype" not in stored
            place = ("slots", "positions", "csr" if kind is ag.Paged else "slots")[(number + index) % 3]
            spec = ag.AttentionSpec(heads=heads, dtype=dtype, kv=kind(**fields, **stored))
            found.append(Case(spec, stacked and same, place))
        if "k_dtype" not in stored and stored.get("group_size") != 64:
            kv = ag.Paged(page_size=PAGE, **stored)
            found += [
                Case(ag.AttentionSpec(heads=LATENT, dtype=dtype, kv=kv), joined, place)
                for joined, place in ((False, "slots"), (True, "positions"))
            ]
    return found


def check(case: Case, ops: ag.Ops, device: str) -> None:
    """Raise where a byte of the cache is not what it should be."""
    generator = torch.Generator().manual_seed(7)
    bases = {name: poison(shape, dtype, generator) for name, (shape, dtype) in shapes(case).items()}
    given = factors(case, generator)
    k, v = new_tokens(case, generator)
    where, slot = places(case, generator)
    want = {name: base.clone() for name, base in bases.items()}
    write(case, want, given, k, v, slot)
    got = {name: base.to(device) for name, base in bases.items()}
    kwargs = {name: x.to(device) for name, x in (given | where).items()}
    for name in ("k_scale", "v_scale"):
        if name in got:
            kwargs[name] = got[name]
    cache = arranged(case, got)
    if case.spec.heads.kind == "mla":
        ckv, kpe = (x.squeeze(1).to(device) for x in k.split((96, 32), -1))
        ops.append(torch.cat([ckv, kpe], -1) if case.stacked else (ckv, kpe), None, cache, **kwargs)
    else:
        ops.append(k.to(device), v.to(device), cache, **kwargs)
    for name, base in want.items():
        differ = (as_bytes(base) != as_bytes(got[name].cpu())).nonzero()
        assert not len(differ), (
            f"{name}: {len(differ)} bytes of {as_bytes(base).numel()}, first at {differ[0].tolist()}"
        )


def shapes(case: Case) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Memory of the cache: with gaps between rows where keys and values lie apart."""
    spec = case.spec
    storages = dict(zip("kv", spec.kv.storages(spec.dtype), strict=True))
    latent = spec.heads.kind == "mla"
    widths = {"k": 128 if latent and case.stacked else 96 if latent else spec.heads.head_dim_qk, "v": 0}
    widths |= {"v": 0 if latent else spec.heads.value_dim, "pe": 32 if latent and not case.stacked else 0}
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, width in widths.items():
        storage = storages["v" if name == "v" else "k"]
        if not width or (name == "v" and case.stacked):
            continue
        lead = lead_of(case, stacked=case.stacked and not latent)
        gap = 0 if case.stacked else 32 // storage.row.itemsize
        found[name] = ((*lead, width // storage.packed + gap), torch_dtype(storage.dtype))
        if storage.block:
            inner = (width // storage.block, 2) if storage.zero_point else (width // storage.block,)
            found[f"{name}_blocks"] = ((*lead, *inner), torch_dtype(storage.row.block_scale))
    for side, storage in storages.items():
        if storage.scale == "token" and not (latent and side == "v"):
            found[f"{side}_scale"] = (lead_of(case, stacked=False), torch.float32)
    return found


def lead_of(case: Case, *, stacked: bool) -> tuple[int, ...]:
    kv, heads = case.spec.kv, case.spec.heads
    own = () if heads.kind == "mla" else (heads.num_kv_heads,)
    if kv.kind == "contiguous":
        return (BATCH, LEN, *own)
    if kv.kind == "ragged":
        return (BATCH * LEN, *own)
    lead = (PAGES, *own, PAGE) if kv.layout == "HND" else (PAGES, PAGE, *own)
    return (*lead[: kv.stack_dim], 2, *lead[kv.stack_dim :]) if stacked else lead


def poison(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bytes."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def widths_of(case: Case) -> tuple[int, int, int]:
    """Elements of keys, values and kpe in a row of memory."""
    heads = case.spec.heads
    k, v = case.spec.kv.storages(case.spec.dtype)
    if heads.kind == "mla":
        return (128 if case.stacked else 96) // k.packed, 0, 32 // k.packed
    return heads.head_dim_qk // k.packed, heads.value_dim // v.packed, 0


def parts(case: Case, bases: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``k``, ``v``, ``pe`` and their blocks without gaps, as the user sees them."""
    wide = dict(zip(("k", "v", "pe"), widths_of(case), strict=True))
    found = {}
    for name, base in bases.items():
        cut = base[..., : wide[name]] if name in wide else base
        if case.stacked and case.spec.heads.kind != "mla" and not name.endswith("scale"):
            at = case.spec.kv.stack_dim
            found[name], found[name.replace("k", "v", 1)] = cut.select(at, 0), cut.select(at, 1)
        else:
            found[name] = cut
    return found


def arranged(case: Case, bases: dict[str, torch.Tensor]) -> Any:
    """The cache as decode takes it."""
    if case.stacked:
        return (bases["k"], bases["k_blocks"]) if "k_blocks" in bases else bases["k"]
    found = parts(case, bases)
    pair = [
        (found[name], found[f"{name}_blocks"]) if f"{name}_blocks" in found else found[name]
        for name in ("k", "pe" if "pe" in found else "v")
    ]
    return tuple(pair)


def factors(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Factors that the caller gives."""
    found = {}
    latent = case.spec.heads.kind == "mla"
    heads = 1 if latent else case.spec.heads.num_kv_heads
    for side, storage in zip("kv", case.spec.kv.storages(case.spec.dtype), strict=True):
        if storage.scale in ("tensor", "head") and not (latent and side == "v"):
            count = 1 if storage.scale == "tensor" else heads
            found[f"{side}_scale"] = torch.rand(count, generator=generator) * 0.02 + 0.005
    return found


def new_tokens(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of many magnitudes, rows and blocks of zeros, ties; not contiguous. Keys of latents are joined."""
    spec = case.spec
    latent = spec.heads.kind == "mla"
    heads = 1 if latent else spec.heads.num_kv_heads
    dims = (128, 16) if latent else (spec.heads.head_dim_qk, spec.heads.value_dim)
    found = []
    for dim in dims:
        x = torch.randn(heads, TOKENS, dim, generator=generator)
        x = x * torch.exp2(torch.randint(-12, 4, (heads, TOKENS, 1), generator=generator).float())
        x[:, 3] = 0.0
        x[:, 4, :32] = -0.0
        x[:, 5] = torch.arange(dim) / 16 - 2
        x[:, 6] = x[:, 6].abs()
        x[:, 7] = -x[:, 7].abs() * 300
        x[:, 8] *= 1e-6
        found.append(x.to(torch_dtype(spec.dtype)).transpose(0, 1))
    return found[0], found[1]


def places(case: Case, generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments that say where tokens go, and the slot of each; some are skipped."""
    kind = case.spec.kv.kind
    count = PAGES * PAGE if kind == "paged" else BATCH * LEN
    skipped = torch.arange(TOKENS) % 5 == 2
    if case.place == "slots":
        slot = torch.randperm(count, generator=generator)[:TOKENS].masked_fill(skipped, -1)
        return {"slot_mapping": slot.int() if case.stacked else slot}, slot
    request = torch.arange(TOKENS) % BATCH
    capacity = 2 * PAGE if kind == "paged" else LEN
    position = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(BATCH)])[
        request, torch.arange(TOKENS) // BATCH
    ]
    position = position.masked_fill(skipped, -3)
    where = {"positions": position.int(), "batch_indices": request.int()}
    slot = request * LEN + position
    if kind == "paged":
        table = torch.randperm(PAGES, generator=generator)[: 2 * BATCH].view(BATCH, 2)
        slot = table[request, position.clamp(min=0) // PAGE] * PAGE + position % PAGE
        if case.place == "csr":
            where |= {"kv_indptr": torch.arange(0, 2 * BATCH + 1, 2).int(), "kv_indices": table.flatten().int()}
        else:
            where["page_table"] = table.int()
    elif kind == "ragged":
        where["kv_indptr"] = torch.arange(0, BATCH * LEN + 1, LEN).int()
    return where, slot.masked_fill(skipped, -1)


def write(
    case: Case,
    bases: dict[str, torch.Tensor],
    given: dict[str, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """The same by index assignment, one token at a time."""
    found = parts(case, bases)
    latent = case.spec.heads.kind == "mla"
    for side, x, storage in zip("kv", (k, v), case.spec.kv.storages(case.spec.dtype), strict=True):
        if latent and side == "v":
            continue
        factor = given.get(f"{side}_scale")
        data, blocks, tokens = quantize(
            x, storage, factor[0] if storage.scale == "tensor" and factor is not None else factor
        )
        for t in range(TOKENS):
            if int(slot[t]) < 0:
                continue
            if tokens is not None:
                place(case, found[f"{side}_scale"], int(slot[t])).copy_(tokens[t].squeeze() if latent else tokens[t])
            split = side == "k" and "pe" in found
            cut = 96 if split else None
            put(case, found, side, storage, data[t], None if blocks is None else blocks[t], int(slot[t]), slice(0, cut))
            if split:
                put(
                    case,
                    found,
                    "pe",
                    storage,
                    data[t],
                    None if blocks is None else blocks[t],
                    int(slot[t]),
                    slice(96, None),
                )


def put(
    case: Case,
    found: dict[str, torch.Tensor],
    name: str,
    storage: Storage,
    data: torch.Tensor,
    blocks: torch.Tensor | None,
    slot: int,
    dims: slice,
) -> None:
    """Some of the columns of one token."""

    def columns(step: int) -> slice:
        return slice(dims.start // step, None if dims.stop is None else dims.stop // step)

    latent = case.spec.heads.kind == "mla"
    row = data[..., columns(storage.packed)]
    place(case, found[name], slot).copy_(row.squeeze(0) if latent else row)
    if blocks is not None:
        own = blocks[:, columns(storage.block)]
        place(case, found[f"{name}_blocks"], slot).copy_(own.squeeze(0) if latent else own)


def place(case: Case, tensor: torch.Tensor, slot: int) -> torch.Tensor:
    """All heads of one token."""
    kv = case.spec.kv
    if kv.kind == "ragged":
        return tensor[slot]
    outer, inner = divmod(slot, PAGE if kv.kind == "paged" else LEN)
    return tensor[outer, :, inner] if kv.kind == "paged" and kv.layout == "HND" else tensor[outer, inner]


def main() -> None:
    """Child's entry point."""
    every = cases("fp16")
    for case in every:
        try:
            check(case, ag.compile(case.spec, target="interpret", backend="triton", ops=()), "cpu")
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(every)} cases")


if __name__ == "__main__":
    main()
