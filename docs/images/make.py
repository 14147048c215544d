"""The picture of README.md, made anew: ``make docs-images``. Needs Chromium (Debian: ``apt-get install chromium``)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

FOLDER = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def report(path: Path) -> None:
    """The report on two layers of Llama 3 8B on a machine of eight H100."""
    with torch.device("meta"):
        sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128_256, num_hidden_layers=2, use_cache=False, **sizes))
        ids = torch.empty(8, 4096, dtype=torch.int64)
    half = sw.Precision(compute=torch.bfloat16, parameter=torch.float32, reduce=torch.float32)
    batch = {"input_ids": ids, "labels": ids}
    sw.plan(model, batch, sw.Cluster.load("h100-1x8"), mesh=sw.Mesh(dp=2, tp=4), precision=half).report.write(path)


def main() -> int:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"no picture was made: none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        report(page)
        settings = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
        picture = FOLDER / "report.png"
        command = (browser, *settings, "--window-size=1200,1000", f"--screenshot={picture}", page.as_uri())
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
