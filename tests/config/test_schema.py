"""The stored JSON schema is that of MoEConfig. `python tests/config/test_schema.py` writes it."""

import json
import subprocess
import sys

from moe_mk.config.moe import MoEConfig
from moe_mk.lab.cli.app import SCHEMA


def schema() -> str:
    return json.dumps(MoEConfig.model_json_schema(), indent=2) + "\n"


def test_the_stored_schema_is_that_of_the_configuration() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema(), "stale: run python tests/config/test_schema.py"


def test_the_schema_is_printed_without_torch() -> None:
    program = (
        "import sys\nfrom moe_mk.lab.cli.app import app\n"
        "try: app(['schema'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "MoEConfig"


if __name__ == "__main__":
    SCHEMA.write_text(schema(), encoding="utf-8")
