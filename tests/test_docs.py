"""README and docs/: links, code, tables, and figures that can be checked."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

import jaxspec
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.lab import lossless
from jaxspec.models.registry import FAMILIES

matplotlib.use("agg")

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "results" / "gpu" / "README.md", *sorted((ROOT / "configs").rglob("*.md"))]


def prose(page):
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page):
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))


def anchors(page):
    """The anchors that GitHub and MkDocs give to the headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def table(page, heading):
    """The rows below a heading, as lists of cells."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    section = re.split(r"^## ", text.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows if not row.startswith("---")]


def ours(registry):
    """Entries that come with jaxspec; tests register more."""
    return {name: entry for name, entry in registry.items() if entry.__module__.startswith("jaxspec.")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        # The site consists only of docs/.
        assert page.parent.name != "docs" or (ROOT / "docs") in target.parents, link


def test_links_are_found():
    assert len(links(ROOT / "README.md")) > 10
    assert "adaptive-k" in anchors(ROOT / "docs" / "design.md")


def test_every_page_is_reached_from_the_first():
    reached = links(ROOT / "docs" / "index.md")
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= set(reached)


def test_the_design_names_files_that_exist():
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / "docs" / "design.md").read_text("utf-8")))
    assert len(named) > 20
    assert {
        name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "jaxspec"))
    } == set()


def test_tests_that_the_table_of_bugs_names_exist():
    text = (ROOT / "tests" / "README.md").read_text("utf-8")
    named = set(re.findall(r"([\w/]+\.py)::((?:Test\w+::)?test_\w+)", text))
    assert len(named) > 50
    missing = []
    for file, name in named:
        sources = [path.read_text("utf-8") for path in (ROOT / "tests").rglob(file)]
        kinds = [f"class {each}(" if each[0] == "T" else f"def {each}(" for each in name.split("::")]
        if not any(all(kind in source for kind in kinds) for source in sources):
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", ["index.md", "serving.md", "experiments.md"])
def test_code_runs(page, tiny_config, monkeypatch, tmp_path, capsys):
    """On the tiny model."""
    load = jaxspec.load
    options = {"progress": False, "max_model_len": 96}

    def tiny(model, **given):
        return load(tiny_config, **options | given)

    monkeypatch.setattr(jaxspec, "load", tiny)
    monkeypatch.setattr(lossless, "load", tiny)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    module = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec"), module)
    pyplot.close("all")
    assert capsys.readouterr().out


def test_the_reference_has_every_public_name():
    named = set()
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), flags=re.MULTILINE):
            try:
                named.update(vars(importlib.import_module(path)))
            except ModuleNotFoundError:
                named.add(path.rpartition(".")[2])
    assert set(jaxspec.__all__) <= named


def test_the_site_builds(tmp_path):
    """In strict mode: warnings, broken links and anchors, and unknown names are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "jaxspec" / "index.html").exists()


def test_every_shipped_configuration_is_listed():
    listed = {row[0].strip("`") for row in table("compatibility.md", "Configurations")}
    assert set(jaxspec.list_configs()) == listed - {"name"}


def test_every_family_is_listed_with_its_architecture():
    listed = {row[0].strip("`"): row[3] for row in table("compatibility.md", "Families")[1:]}
    assert set(listed) == set(ours(FAMILIES))
    architectures = {f"as `{family.gguf.name}`" for family in ours(FAMILIES).values() if family.gguf}
    for model_type, family in ours(FAMILIES).items():
        if family.gguf is not None:
            names = filter(None, (family.gguf.name, family.gguf.other_name))
            assert listed[model_type] == ", ".join(f"`{name}`" for name in names)
        else:
            assert listed[model_type] in ("none", *architectures)


def test_every_drafter_is_listed():
    listed = {row[0].strip("`") for row in table("compatibility.md", "Drafters")[1:]}
    assert listed == set(ours(DRAFTERS))


def test_steps_are_those_of_their_files():
    header, *rows = table("performance.md", "Steps on a GPU, and their lower bound")
    for _, *cells, file in rows:
        result = json.loads((ROOT / "results" / "gpu" / file.strip("`")).read_text("utf-8"))
        measured = {
            f"batch {row['batch']}": f"{row['step_ms']:.2f} ({row['bandwidth_share']:.0%})"
            for row in result["rows"]
        }
        assert [cell.replace(" %", "%") for cell in cells] == [
            measured.get(batch, "") for batch in header[1:-1]
        ]
    (shown,) = re.findall(r"takes ([\d.]+) ms at batch 1 and ([\d.]+) at batch 32", README.read_text("utf-8"))
    llama = next(row for row in rows if "llama3-8b" in row[-1])
    assert [cell.partition(" ")[0] for cell in (llama[1], llama[3])] == list(shown)


def test_whole_requests_are_those_of_their_files():
    names = ["ttft 512", "ttft 4096", "prefill 16x2048", "single 512+256"]
    names += ["mixed 256", "mixed 256, T=1", "shared 64x1024"]
    rows = table("performance.md", "Whole requests on one H200")[1:]
    for column, model in ((1, "llama3-8b"), (2, "smollm2-135m")):
        times = {}
        for suffix in ("", "-t1"):
            path = ROOT / "results" / "gpu" / "h200" / f"load-{model}{suffix}.json"
            result = json.loads(path.read_text("utf-8"))
            kind = f", T={result['temperature']:.0f}" if result["temperature"] else ""
            times |= {row["name"] + kind: row["total_ms"] for row in result["rows"]}
        for name, row in zip(names, rows, strict=True):
            shown = row[column].replace(",", "")
            digits = len(shown.partition(".")[2])
            assert shown == f"{times[name]:.{digits}f}", name


def test_the_comparison_of_engines_adds_up():
    """The last column is the better peer's time over ours, and the README shows the first row."""
    rows = table("performance.md", "One H100, compared with vLLM and SGLang")[1:]
    assert len(rows) == 9
    for name, *cells in rows:
        vllm, sglang, ours, ratio = (float(cell.strip("*").replace(",", "")) for cell in cells)
        assert f"{min(vllm, sglang) / ours:.2f}" == f"{ratio:.2f}", name
        assert (ratio < 1) == cells[-1].startswith("**"), name
    vllm, sglang, ours = rows[0][1:4]
    assert f"**{ours} ms**; vLLM {vllm}, SGLang {sglang}" in README.read_text("utf-8")
