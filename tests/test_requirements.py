"""docs/requirements.md: every row has a test, every mark has a row, and the page is up to date."""

from pathlib import Path

from requirements_table import PAGE, collect_tests, fill_in, page_labels

LABELS = [*(str(number) for number in range(1, 96)), *(f"I{number}" for number in range(1, 16))]
EXAMPLE = """
@pytest.mark.requirement(2)
@pytest.mark.parametrize("number", [7])
def test_b(): ...

@pytest.mark.invariant(1)
@pytest.mark.requirement(1, 2)
def test_a(): ...

@pytest.mark.requirement(2)
def test_c(): ...

@pytest.mark.requirement(2)
def test_d(): ...

@pytest.mark.requirement(1)
def helper(): ...
"""


def test_by_hand(tmp_path: Path) -> None:
    """Cells follow the order of the file; a fourth test is counted, and a row without a test is emptied."""
    (tmp_path / "test_x.py").write_text(EXAMPLE)
    page = "| # | what | tests |\n|---|---|---|\n| 1 | One. | |\n| 2 | Two. | `old` |\n| 3 | Three. | `old` |\n"
    assert fill_in(page, collect_tests(tmp_path)).splitlines()[2:] == [
        "| 1 | One. | `test_x.py::test_a` |",
        "| 2 | Two. | `test_x.py::test_b`, `test_x.py::test_a`, `test_x.py::test_c`, +1 |",
        "| 3 | Three. |  |",
    ]
    assert fill_in("| I1 | I. | |", collect_tests(tmp_path)) == "| I1 | I. | `test_x.py::test_a` |"


def test_page() -> None:
    """All 95 requirements and 15 invariants have a row and a test, and the committed page is the generated one."""
    page, tests = PAGE.read_text(), collect_tests()
    assert sorted(page_labels(page)) == sorted(LABELS)
    assert [label for label in LABELS if label not in tests] == [], "mark a test for each of these rows"
    assert sorted(set(tests) - set(LABELS)) == [], "marks that name no row"
    assert page == fill_in(page, tests), "run `python tests/requirements_table.py`"
