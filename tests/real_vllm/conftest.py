import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin" / "python"


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(1500))
        if not PYTHON.exists():
            item.add_marker(pytest.mark.skip(reason=f"{PYTHON} is missing; `bash tools/setup_vllm.sh cpu` makes it"))
        elif not sys.platform.startswith("linux"):
            item.add_marker(pytest.mark.skip(reason="the CPU build of vLLM is for Linux"))
