"""The core trains with torch, numpy, pydantic, PyYAML, click, rich and filelock alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from makers import SettingsMaker, TokenStoreMaker

ROOT = Path(__file__).parents[2]
ABSENT = (
    *("ray", "gigatoken", "tokenizers", "datasets", "pyarrow", "tensorboard", "matplotlib", "jinja2"),
    *("transformers", "safetensors", "huggingface_hub", "megatron", "prometheus_client"),
)

# Read by Python before anything else: none of these can be imported, as if they were not installed.
SITE_CUSTOMIZE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_the_core_trains_resumes_and_evaluates_alone(
    tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker
) -> None:
    settings = small_settings(tmp_path, train__eval_every=1, train__warmup_steps=0, checkpoint__every=2)
    token_store(settings.data_dir)
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(settings.resolved()))
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(hook), str(ROOT)))}

    def python(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *argv]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    attempt = "import sys\nfor name in sys.argv[1:]:\n try: __import__(name)\n except ImportError: print(name)"
    assert python("-c", attempt, *ABSENT).stdout.split() == list(ABSENT)

    for steps in (3, 5):
        done = python("-m", "training", "train", "--config", str(file), "--train.steps", str(steps))
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith("tensorboard is not installed")
        assert "Traceback" not in done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for kind in ("train", "valid"):
        assert [r["step"] for r in records if r["type"] == kind] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in records if r["type"] == "start"] == [0, 3]
    assert records[-1]["type"] == "checkpoint"
