"""The README's figures are those of the committed results. Its commands: test_docs_run.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_results_file() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import readme_figures

    assert readme_figures.render(ROOT) in README, "run: python tools/readme_figures.py --write"


def test_figures_may_come_from_another_cards_run(tmp_path: Path) -> None:
    """The card, what ``flash`` ran, a word on a run of older kernels, and no page that is not there."""
    sys.path.insert(0, str(ROOT / "tools"))
    import readme_figures

    older = "reports/h100-sxm/results.jsonl"
    block = readme_figures.render(ROOT, older)
    assert "On one NVIDIA H100 80GB HBM3 (torch" in block
    assert "This run is older than `flash-v3`" in block
    assert "[report.html](reports/h100-sxm/report.html)" in block
    (tmp_path / older).parent.mkdir(parents=True)
    (tmp_path / older).write_text((ROOT / older).read_text())
    assert f"(from [{older}]({older}))" in readme_figures.render(tmp_path, older)
    today = readme_figures.render(ROOT)
    assert "On one NVIDIA H200 (torch" in today
    assert "`flash` ran the kernels of `flash-v3`." in today


def test_pictures_are_of_the_results_file(tmp_path: Path) -> None:
    """Their JSON and data, which stand beside them, are what the tool writes now."""
    from flashbench import runfile
    from flashbench._cli.report import results_of
    from flashbench.report import export

    pictures = [ROOT / path for path in re.findall(r"!\[[^]]+\]\((\S+\.svg)\)", README)]
    assert len(pictures) == 2
    (folder,) = {path.parent.parent for path in pictures}
    results = results_of([runfile.load(folder / "results.jsonl")])
    names = [path.name.split("-")[0] for path in pictures]
    export.write(results, tmp_path, formats=(), names=names, style="paper")
    for path in pictures:
        assert path.is_file()
        for end in (".json", ".csv"):
            again = (tmp_path / path.with_suffix(end).name).read_bytes()
            assert again == path.with_suffix(end).read_bytes(), f"flashbench report --figures: {path}"
