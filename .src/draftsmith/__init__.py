"""Train, evaluate and export speculative-decoding draft heads."""

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, import the folders themselves, so that tracebacks and breakpoints name train/loop.py.
_root = Path(__file__).resolve().parents[2]
if (_root / "train" / "__init__.py").is_file():
    __path__ = [str(_root)]
