"""The models at full width of ``benchmarks/split_share.py``, which is a script and in no package."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "split_share.py"

_spec = spec_from_file_location("split_share", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
_script = module_from_spec(_spec)
sys.modules[_spec.name] = _script  # dataclasses look their module up
_spec.loader.exec_module(_script)

CASES = _script.CASES
measure = _script.measure
