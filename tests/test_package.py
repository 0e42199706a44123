"""The package: its links are the top-level folders, so that an installed wheel holds what a checkout imports."""

from pathlib import Path

import draftsmith

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / ".src" / "draftsmith"


def stage_folders() -> set[str]:
    """The top-level folders that are Python packages; the tests are none."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")}


def test_the_package_links_exactly_the_top_level_folders() -> None:
    assert {path.name for path in LINKS.iterdir() if path.is_symlink()} == stage_folders()


def test_every_link_is_relative_and_leads_to_the_folder_of_its_name() -> None:
    for name in stage_folders():
        assert (LINKS / name).readlink() == Path("../..") / name


def test_a_checkout_imports_the_folders_themselves() -> None:
    assert list(draftsmith.__path__) == [str(ROOT)]


def test_every_file_of_the_package_starts_with_a_docstring() -> None:
    without = [
        str(path.relative_to(ROOT))
        for name in stage_folders()
        for path in (ROOT / name).rglob("*.py")
        if not path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert without == []
