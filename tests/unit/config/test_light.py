"""A configuration is checked in a moment, on a host that has neither torch nor SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parents[3] / "config/appliance.yaml"
HEAVY = ("torch", "sglang", "sgl_kernel", "numpy", "triton", "transformers", "pynvml")
CPU_LIMIT_S = 1.0  # about twice what it takes, for slow and busy machines

PROGRAM = """
import json, resource, sys
from pathlib import Path
from ddtree_appliance.config_source import load_config
from ddtree_appliance.engine_args import sglang_arguments
arguments = sglang_arguments(load_config(Path(sys.argv[1])))
usage = resource.getrusage(resource.RUSAGE_SELF)
modules = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"arguments": arguments, "modules": modules, "cpu_s": usage.ru_utime + usage.ru_stime}))
"""


def test_a_check_imports_nothing_heavy_and_takes_a_fraction_of_a_second() -> None:
    command = [sys.executable, "-c", PROGRAM, str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SAMPLE.parents[1], timeout=60)
    found = json.loads(done.stdout)
    print(f"CPU time of a check, the interpreter's start included: {found['cpu_s']:.2f} s")
    assert found["arguments"][:2] == ["--model-path", "/srv/models/target"]
    assert [name for name in HEAVY if name in found["modules"]] == []
    assert found["cpu_s"] < CPU_LIMIT_S
