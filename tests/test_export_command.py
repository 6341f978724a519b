"""The command that writes packages."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import attngen as ag
from attngen.cli import app
from attngen.target import Target

CPU = Target.parse("cpu")


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    spec = ag.AttentionSpec(name="tiny", heads=ag.MHA(num_heads=2, head_dim=16), mask=ag.Causal(), dtype="fp32")
    (tmp_path / "tiny.toml").write_text(spec.to_toml())
    common = ["export", str(tmp_path / "tiny.toml"), "-o", str(tmp_path / "out"), "--target", str(CPU)]
    result = CliRunner().invoke(app, [*common, "--name", "tiny_attention", "--ops", "prefill"])
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"install them with: pip install {tmp_path / 'out'}\n")
    assert "decode: not exported" in result.stderr
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "mask   k <= q\nlogit  score\n" in readme
    assert "| `q` | `[batch, qo_len, 2, 16]` | torch.float32 |" in readme
    refused = CliRunner().invoke(app, [*common, "--name", "not-a-name"])
    assert (refused.exit_code, "is no plain identifier" in refused.stderr) == (1, True)
