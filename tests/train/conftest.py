"""Makes toy_run importable in the tests of this folder; it is also run as a script, by several processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
