"""Errors of contenders, and results written with the machine they came from."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Row:
    """One contender on one case: median milliseconds over rounds, and the rate that follows from it."""

    case: str
    contender: str
    ms: float
    rate: float
    unit: str
    error: float


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    got, exact = got.double(), exact.double()
    return float((got - exact).norm() / exact.norm())


def versions() -> dict[str, str]:
    """Of the installed systems that take part on a GPU."""
    names = ("triton", "fa3-fwd", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python")
    found = {name: [d.version for d in distributions(name=name)] for name in names}
    return {name: numbers[0] for name, numbers in found.items() if numbers}


def report(name: str, rows: list[Row], **notes: Any) -> None:
    """Print a table and write ``results/<name>-<machine>.json``."""
    for row in rows:
        print(f"{row.case:44s} {row.contender:16s} {row.ms:10.4f} ms {row.rate:9.2f} {row.unit:8s} err {row.error:.1e}")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    machine = gpu or platform.processor() or platform.machine()
    record = {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        **notes,
        "rows": [asdict(row) for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    slug = "".join(c if c.isalnum() else "-" for c in machine.lower()).strip("-")
    (RESULTS / f"{name}-{slug}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
