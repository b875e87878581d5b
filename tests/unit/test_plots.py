"""Pictures come from data: every data file has the form, a bad one is named, and no picture is out of date."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
DATA = BENCHMARKS / "results" / "data"
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "performance.md"
FILES = sorted(DATA.glob("*.json"))
NAMES = ("step", "allreduce", "hook_overhead", "network", "fewer_bytes", "plan", "memory")
IMAGE = re.compile(r"!\[([^\]]*)\]\(pictures/(performance-[\w-]+\.svg)\)")


@pytest.fixture(scope="module")
def plots(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        # Where matplotlib keeps what it finds out about fonts.
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        import plots

        yield plots
        del sys.modules["plots"], sys.modules["result"]


@pytest.fixture
def data(tmp_path):
    return Path(shutil.copytree(DATA, tmp_path / "data"))


def changed(file, change):
    """Change what a JSON file holds."""
    told = json.loads(file.read_text("utf-8"))
    change(told)
    file.write_text(json.dumps(told), encoding="utf-8")


def run(plots, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plots.py", *map(str, arguments)])
    code = plots.main()
    told = capsys.readouterr()
    return code, told.out, told.err


def write_bars(plots, monkeypatch, capsys, data, out, page):
    """Write the table of bars, and draw one picture."""
    arguments = ("--data", data, "--out", out, "--only", "memory", "--page", page)
    return run(plots, monkeypatch, capsys, *arguments)


def texts(svg):
    """List everything that is written in a picture, from top to bottom."""
    tree = ET.fromstring(svg.read_text("utf-8"))  # noqa: S314 - our own file
    return ["".join(each.itertext()) for each in tree.iter("{http://www.w3.org/2000/svg}text")]


# ---------------------------------------------------------------- the data


def test_there_is_data():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_data_file_is_a_result(plots, file):
    result = plots.Result.read(file)
    command = result.machine["command"]
    assert command.startswith(("python benchmarks/", "benchmarks/network.sh "))
    assert f"benchmarks/{result.benchmark}.py" in command
    assert " /" not in command
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result.machine["date"])
    # What is quoted was measured on a quiet machine.
    assert all(table.rounds is None or table.rounds["quiet"] for table in result.tables.values())
    for bar in result.bars:
        if bar.place:
            table, variant, name = bar.place
            figure = result.tables[table].variants[variant][name]
            value = figure.median if isinstance(figure, plots.Spread) else figure
            assert bar.value == value


def test_what_is_written_can_be_read_again(plots, tmp_path):
    again = tmp_path / "again.json"
    for file in FILES:
        result = plots.Result.read(file)
        result.write(again)
        assert plots.Result.read(again) == result


def lacks(place):
    """Make a change that takes something away."""

    def change(told):
        *path, last = place.split("/")
        for name in path:
            told = told[name]
        del told[last]

    return change


def holds(place, value):
    """Make a change that puts something else there."""

    def change(told):
        *path, last = place.split("/")
        for name in path:
            told = told[int(name) if isinstance(told, list) else name]
        told[last] = value

    return change


OWN = "tables/mlp/variants/rankstep"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (holds("schema", "other/1"), "schema: is 'other/1', and only 'rankstep-benchmark/1'"),
        (lacks("schema"), "schema: is None"),
        (lacks("machine"), "lacks 'machine'"),
        (lacks("machine/date"), "machine: lacks 'date'"),
        (holds("machine/cores", 2), "machine.cores: must be a text, not 2"),
        (holds("tables", {}), "tables: holds none"),
        (holds("tables", []), r"tables: must be an object, not \[\]"),
        (holds("tables/mlp/variants", {}), "tables.mlp.variants: holds none"),
        (lacks("tables/mlp/rounds"), "tables.mlp: lacks 'rounds'"),
        (lacks("tables/mlp/rounds/quiet"), "tables.mlp.rounds: lacks 'quiet'"),
        (holds("tables/mlp/rounds/run", "8"), 'rounds.run: must be a whole number, not "8"'),
        (lacks("tables/mlp/facts"), "tables.mlp: lacks 'facts'"),
        (lacks(f"{OWN}/wall_ms/q25"), "tables.mlp.variants.rankstep.wall_ms: lacks 'q25'"),
        (holds(f"{OWN}/wall_ms/q75", 0.0), "wall_ms: min, q25, median, q75 are not in ascending"),
        (holds(f"{OWN}/wall_ms/median", "1"), "wall_ms.median: must be a finite number, not '1'"),
        (holds(f"{OWN}/wall_ms", True), "wall_ms: must be a finite number, not True"),
        (holds(f"{OWN}/wall_ms", float("nan")), "wall_ms: must be a finite number, not nan"),
        (lacks("bars"), "lacks 'bars'"),
        (holds("bars/0/limit", None), r"bars\[0\].limit: must be a finite number, not None"),
        (holds("bars/0/place", ["mlp"]), r"bars\[0\].place: must be table, variant, figure"),
    ],
)
def test_a_bad_file_is_named(plots, data, change, told):
    file = data / "step.json"
    plots.Result.read(file)
    changed(file, change)
    with pytest.raises(plots.BadResultError, match=f"^{re.escape(str(file))}: .*{told}"):
        plots.Result.read(file)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "is no JSON: "),
        (b"[1]", r"must be an object, not \[1\]"),
        (b"\xff", "cannot be read: "),
        (None, "cannot be read: "),
    ],
)
def test_a_file_that_is_no_result_at_all(plots, tmp_path, content, told):
    file = tmp_path / "step.json"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(plots.BadResultError, match=f"^{re.escape(str(file))}: {told}"):
        plots.Result.read(file)


# ---------------------------------------------------------------- drawing


@pytest.fixture(scope="module")
def drawn(plots, tmp_path_factory):
    """Draw all pictures of the committed data once."""
    out = tmp_path_factory.mktemp("pictures")
    for name in NAMES:
        plots.draw(name, DATA, out)
    return out


def file_of(name):
    return f"performance-{name.replace('_', '-')}.svg"


def test_all_pictures_are_known(plots):
    assert tuple(plots.PICTURES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_shows_the_figures(plots, drawn, name):
    """Those that are written next to their dots, and the commands that they come from."""
    picture = plots.PICTURES[name]
    written = texts(drawn / file_of(name))
    shown = {
        "step": [("ratio_to_torch_default", ".2f", ("local", "rankstep", "torch default"))],
        "allreduce": [("ratio_to_gloo", ".2f", ("rankstep",))],
        "hook_overhead": [("wall_us_per_parameter", ".2f", ("rankstep", "torch view"))],
        "network": [("wall_ms", ".0f", ("rankstep", "torch default", "all-reduce alone"))],
    }
    for need in picture.needs:
        result = plots.Result.read(DATA / need)
        command = result.machine["command"].partition(" --json ")[0]
        assert any(line.startswith(f"$ {command[:60]}") for line in written)
        tables = result.tables if name != "hook_overhead" else ["set_to_none=True"]
        for table, (figure, spec, variants) in itertools.product(tables, shown.get(name, [])):
            for variant in variants:
                median = result.tables[table].variants[variant][figure].median
                assert format(median, spec) in written
    if name == "plan":
        assert {"MLP", "GPT", "CNN", "predicted", "measured", "auto"} <= {*written}
    if name == "memory":
        own = plots.Result.read(DATA / "memory.json").tables["memory"].variants["rankstep"]
        assert f"{own['in_use']:.3f}; at most {own['in_use_peak']:.3f}" in written
    if name == "fewer_bytes":
        assert {"Rankstep, bf16 wire", "torch, fp16 hook"} <= {*written}


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_its_own_ground_and_is_as_wide_as_a_page(drawn, name):
    svg = (drawn / file_of(name)).read_text("utf-8")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    assert width * 96 / 72 == pytest.approx(830)
    first = re.search(r'<path d="([^"]*)" style="fill: (#\w+)"', svg)
    assert first[2] == "#ffffff"
    assert re.findall(r"[\d.]+", first[1]) == [
        f"{number:g}" for number in (0, height, width, height, width, 0, 0, 0)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_text_covers_another_or_is_cut_off(plots, name):
    with plots.mpl.rc_context(plots.STYLE):
        needs = plots.PICTURES[name].needs
        figure = plots.PICTURES[name].draw(
            [plots.Source(DATA / need, plots.Result.read(DATA / need)) for need in needs]
        )
        boxes = boxes_of(figure)
    assert len(boxes) > 10
    assert not outside(figure, boxes)
    assert not covered(boxes)


def test_the_checkers_find_texts_that_are_covered_and_cut_off(plots):
    figure = plots.Figure(figsize=(4, 2))
    figure.text(0.2, 0.5, "one")
    figure.text(0.22, 0.52, "two")
    figure.text(0.6, 0.5, "three")
    figure.text(0.98, 0.9, "four")
    boxes = boxes_of(figure)
    assert outside(figure, boxes) == ["four"]
    assert covered(boxes) == [("one", "two")]


def boxes_of(figure):
    """Find where each text stands that is drawn."""
    import matplotlib.text

    figure.draw_without_rendering()
    unseen = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    unseen |= {tick.label1, tick.label2}
    return [
        (each.get_text(), each.get_window_extent())
        for each in figure.findobj(matplotlib.text.Text)
        if each.get_visible() and each.get_text().strip() and each not in unseen
    ]


def outside(figure, boxes):
    page = figure.bbox
    return [
        text
        for text, box in boxes
        if box.x0 < page.x0 or box.x1 > page.x1 or box.y0 < page.y0 or box.y1 > page.y1
    ]


def covered(boxes):
    return [
        (one, other)
        for (one, box), (other, another) in itertools.combinations(boxes, 2)
        if box.overlaps(another)
    ]


def test_the_same_data_give_the_same_bytes_and_other_data_others(plots, drawn, data, tmp_path):
    plots.draw("step", data, tmp_path)
    again = tmp_path / file_of("step")
    # Only the checksum tells where a picture comes from, not the folder or the day.
    assert again.read_bytes() == (drawn / again.name).read_bytes()
    spread = dict.fromkeys(("min", "q25", "median", "q75"), 0.567)
    assert "0.57" not in texts(again)
    changed(data / "step.json", holds(f"{OWN}/ratio_to_torch_default", spread))
    plots.draw("step", data, tmp_path)
    assert "0.57" in texts(again)


def test_a_caption_leaves_out_only_the_file_that_was_written(plots, data, tmp_path):
    command = "python benchmarks/step.py --model all --json 'a b.json' --rounds 9"
    changed(data / "step.json", holds("machine/command", command))
    plots.draw("step", data, tmp_path)
    (line,) = (each for each in texts(tmp_path / file_of("step")) if each.startswith("$"))
    assert re.fullmatch(r"\$ python benchmarks/step\.py --model all --rounds 9, \d+ rounds", line)


def test_a_picture_without_data_is_skipped(plots, data, tmp_path, monkeypatch, capsys):
    (data / "step.json").unlink()
    (data / "network-2x2.json").unlink()
    out = tmp_path / "out"
    names = ("--only", "step", "network", "memory")
    code, told, errors = run(
        plots, monkeypatch, capsys, "--data", data, "--out", out, *names
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert told.splitlines() == [
        f"performance-step.svg: skipped, {data} lacks step.json; benchmarks/README.md has the commands",
        f"performance-network.svg: skipped, {data} lacks network-2x2.json; benchmarks/README.md has the commands",
        "performance-memory.svg: drawn from memory.json",
    ]
    assert [file.name for file in out.iterdir()] == ["performance-memory.svg"]


@pytest.mark.parametrize(
    ("name", "file", "change", "told"),
    [
        ("step", "step.json", lacks("bars"), ": lacks 'bars'"),
        ("step", "step.json", holds("benchmark", "plan"), "benchmark: is 'plan', and this picture shows 'step'"),
        ("step", "step.json", lacks(OWN), "tables.mlp.variants: lacks 'rankstep', which this picture"),
        ("step", "step.json", holds(f"{OWN}/ratio_to_torch_default", None), "variants.rankstep: lacks 'ratio_to_torch_default'"),
        ("step", "step.json", holds(f"{OWN}/ratio_to_torch_default", 1), "ratio_to_torch_default: must have quartiles, not be 1"),
        ("allreduce", "allreduce.json", lacks("tables/4 KiB/facts/kib"), "tables.4 KiB.facts: lacks 'kib'"),
        ("hook_overhead", "hook_overhead-2.json", lacks("tables/set_to_none=True"), "tables: lacks 'set_to_none=True'"),
        ("network", "network-2x1.json", holds("tables/gpt", {"variants": {"a": {}}, "rounds": None, "facts": {}}), "tables: must hold one, not mlp, gpt"),
        ("memory", "memory.json", holds("tables/memory/variants/plain/in_use", {"min": 1, "q25": 1, "median": 1, "q75": 1}), "in_use: must be a plain number"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_suit_is_named_and_the_others_are_drawn(
    plots, data, tmp_path, monkeypatch, capsys, name, file, change, told
):
    other = "plan"
    changed(data / file, change)
    out = tmp_path / "out"
    code, said, errors = run(
        plots, monkeypatch, capsys, "--data", data, "--out", out, "--only", name, other
    )
    assert code == 1
    assert errors.startswith(f"{name}: left as it is: {data / file}: ")
    assert told in errors
    assert said == "performance-plan.svg: drawn from plan.json\n"
    assert [each.name for each in out.iterdir()] == ["performance-plan.svg"]


def test_a_tuned_torch_is_needed_to_name_the_best(plots, data, tmp_path):
    def change(told):
        variants = told["tables"]["mlp"]["variants"]
        for name in [each for each in variants if each.startswith("torch ")]:
            if name != "torch default":
                del variants[name]

    changed(data / "step.json", change)
    with pytest.raises(plots.BadResultError, match=r"tables\.mlp\.variants: lacks a tuned torch"):
        plots.draw("step", data, tmp_path)


# ---------------------------------------------------------------- the page


def shown_on_the_page():
    return {file: alt for alt, file in IMAGE.findall(PAGE.read_text("utf-8"))}


def test_the_page_shows_every_picture_and_says_what_is_in_it():
    shown = shown_on_the_page()
    assert sorted(shown) == sorted(map(file_of, NAMES))
    assert all(len(alt) > 40 for alt in shown.values())
    assert {file.name for file in PICTURES.glob("performance-*.svg")} == {*shown}


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_is_out_of_date(plots, drawn, name):
    """After new data or a change of plots.py: `python benchmarks/plots.py`."""
    assert not out_of_date(plots, PICTURES / file_of(name), name, DATA)
    # What is written is the same, whichever version of matplotlib has set it.
    assert texts(PICTURES / file_of(name)) == texts(drawn / file_of(name))


def test_the_checker_finds_a_picture_that_is_out_of_date(plots, data):
    changed(data / "step.json", lambda told: None)
    found = out_of_date(plots, PICTURES / file_of("step"), "step", data)
    assert found == ["step.json"]


def test_the_table_of_bars_is_not_out_of_date(plots, data):
    """After new data: `python benchmarks/plots.py`."""
    table = plots.bars_table(DATA)
    assert f"{plots.BEGIN}{table}{plots.END}" in PAGE.read_text("utf-8")
    changed(data / "step.json", holds("bars/0/limit", 0.5))
    assert plots.bars_table(data) != table


def test_the_table_of_bars(plots, data, tmp_path, monkeypatch, capsys):
    for file in data.iterdir():
        if file.name not in ("step.json", "memory.json", "plan.json"):
            file.unlink()
    changed(
        data / "step.json", holds("bars", json.loads((DATA / "step.json").read_text())["bars"][:2])
    )
    spread = {"min": 0.7, "q25": 0.71, "median": 0.7266, "q75": 0.8}
    changed(data / "step.json", holds(f"{OWN}/ratio_to_torch_default", spread))
    changed(data / "step.json", holds("bars/0/value", 0.7266))
    changed(data / "step.json", holds("bars/1/value", 0.76))
    changed(data / "memory.json", holds("bars", []))
    changed(
        data / "plan.json",
        holds("bars", [{"what": "error", "limit": 0.1, "value": None, "place": None}]),
    )
    page = tmp_path / "page.md"
    page.write_text(f"before\n{plots.BEGIN}old\n{plots.END}after\n", encoding="utf-8")
    code, told, errors = write_bars(plots, monkeypatch, capsys, data, tmp_path / "out", page)
    assert (code, errors) == (0, "")
    assert told.splitlines()[-1] == "page.md: table of bars written"
    lines = page.read_text("utf-8").splitlines()
    date = plots.Result.read(data / "step.json").machine["date"]
    assert lines[0] == "before"
    assert (
        lines[4]
        == f"| mlp: step as a share of torch default's | 0.9 | 0.727 (0.710 .. 0.800) | held | `step.py`, {date} |"
    )
    assert lines[5].startswith("| mlp: sharded step as a share of torch default's | 0.75 | ")
    assert " | **missed** | `step.py`" in lines[5]
    assert lines[6].startswith("| error | 0.1 | not measured |  | `plan.py`")
    assert lines[7:] == [plots.END.strip(), "after"]


@pytest.mark.parametrize(
    "content", [None, "no place", "<!-- written by benchmarks/plots.py: bars -->\n"]
)
def test_a_page_without_a_place_for_the_table_is_named(
    plots, data, tmp_path, monkeypatch, capsys, content
):
    page = tmp_path / "page.md"
    if content is not None:
        page.write_text(content, encoding="utf-8")
    code, told, errors = write_bars(plots, monkeypatch, capsys, data, tmp_path / "out", page)
    assert (code, told) == (1, "performance-memory.svg: drawn from memory.json\n")
    cause = "cannot be read" if content is None else "lacks the lines"
    assert errors.startswith(f"page.md: left as it is: {page}: {cause}")
    assert content is None or page.read_text("utf-8") == content


def out_of_date(plots, svg, name, data):
    """List the data files that have changed since a picture was drawn."""
    told = svg.read_text("utf-8")
    return [
        need
        for need in plots.PICTURES[name].needs
        if f"{need} sha256:{hashlib.sha256((data / need).read_bytes()).hexdigest()}" not in told
    ]
