"""Loading and checking import no heavy library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROBE = """
import sys
for heavy in ("torch", "numpy", "lightning", "pytorch_lightning", "transformers", "omegaconf"):
    sys.modules[heavy] = None
from nxdt_core import config
resolved = config.load(sys.argv[1], ["seed=${trainer.max_steps}"])
assert resolved.run.seed == resolved.run.trainer.max_steps
config.render_show(resolved), config.json_schema(resolved.kernel)
config.check(sys.argv[1], ["seed=x"])
print(resolved.run.name)
"""


def test_the_configuration_imports_neither_torch_nor_numpy(tmp_path, good):
    path = tmp_path / "run.yaml"
    path.write_text(f"{good}plugins: {{local: ['{Path(__file__).parent / 'parts.py'}']}}\n")
    out = subprocess.run([sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=False)
    assert (out.stdout, out.stderr) == ("run\n", "")


def test_the_help_imports_no_pydantic():
    program = "import sys; sys.modules['pydantic'] = None; from nxdt_core.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
