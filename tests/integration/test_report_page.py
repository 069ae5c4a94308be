"""The report page: complete, safe whatever the records say, and good to look at in a real browser."""

import dataclasses
import functools
import html
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slimstart.errors import RecordError
from slimstart.lab.records import Layer, Record, Structure
from slimstart.lab.reports import page, panels, plots, summarise
from slimstart.lab.reports.series import series_of
from tests.records import DENSE_FLOPS, IMAGES, make, study

EVIL = (
    "<script>document.title='pwned'</script><img src=x onerror=alert(1)> \"'&amp; $\\alpha$ 漢字\t\x07 " + "long" * 40
)
RESNET50 = (
    64,
    *itertools.chain(*[(w, w, 4 * w) * n for w, n in ((64, 3), (128, 4), (256, 6), (512, 3))]),
    *(256, 512, 1024, 2048),
)


def evil() -> Record:
    """Its strings are markup, formulas and far too long; it has a single epoch."""
    strings = {f.name: EVIL for f in dataclasses.fields(Record) if f.type in ("str", "str | None")}
    kept = {name: getattr(make(), name) for name in ("started", "finished", "schema")}
    layers = tuple(Layer(f"{i}{EVIL}", 10 + i, i) for i in range(4))
    structures = tuple(Structure(0.1 * i, {one.name: 5 + i for one in layers}) for i in range(2))
    changes = {"layers": layers, "structures": structures, "config": {EVIL: EVIL}}
    return dataclasses.replace(make(epochs=1), **(strings | kept | changes))


@functools.cache
def gallery() -> str:
    """A study of three seeds, a deep network that was not timed, and the evil one."""
    deep = [
        make(method, 0.3, epochs=8, widths=RESNET50, timed=False, model="resnet50") for method in ("dense", "slimstart")
    ]
    return page.render([*study(), *deep, evil()])


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


# --- what is on the page ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    runs = [make(method, seed=seed, epochs=3) for method in ("slimstart", "uniform") for seed in range(2)]
    content = page.render(runs)
    assert page.render(runs[::-1]) == content
    page.write(runs, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == content.encode()
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert re.search(r"#fe01..", content) is None  # every sentinel has become a colour of the page


def test_a_report_needs_a_run() -> None:
    with pytest.raises(RecordError, match="`records` is empty"):
        page.render([])


def test_the_table_has_the_numbers() -> None:
    accuracies = (92.0, 93.0, 94.0)
    runs = [make(seed=seed, accuracy=accuracy) for seed, accuracy in enumerate(accuracies)]
    content = page.render([*runs, make("dense", accuracy=95.5)])
    rows = re.findall(r"<tr>(.*?)</tr>", content, re.DOTALL)
    cells = [[re.sub(r"<.*?>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in rows]
    assert [row[:5] for row in cells[1:]] == [
        ["dense", "–", "1", "95.50", "100"],
        ["slimstart", "flops=0.1", "3", "93.00 ± 1.00", "10.0"],
    ]


def test_markup_and_formulas_in_records_are_shown_as_text() -> None:
    content = page.render([evil()])
    elements = Elements(content)
    assert not elements.all("script")
    assert not elements.all("img")
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert "<script>document.title='pwned'</script>" in elements.text
    assert "$\\alpha$" in elements.text
    figures = re.findall(r"<figure>.*?</figure>", content, re.DOTALL)
    assert len(figures) == 3  # of a single run of one epoch: step times, widths over time, widths
    for figure in figures:
        drawn = "".join(re.findall(r"<text.*?</text>", figure))
        assert "mathdefault" not in drawn
    assert "&lt;script&gt;d" in "".join(figures)


def test_the_page_needs_nothing_else_and_allows_nothing_else() -> None:
    elements = Elements(gallery())
    (policy,) = [
        meta["content"] for meta in elements.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    addresses = [
        a[name] or "" for _, a in elements.found for name in ("src", "href", "xlink:href", "action") if name in a
    ]
    assert addresses
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    style = re.search(r"<style>.*</style>", gallery(), re.DOTALL)
    assert style is not None
    assert not re.search(r"@import|url\(", style[0])


def test_the_page_is_sound_and_accessible() -> None:
    elements = Elements(gallery())
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {address[1:] for _, a in elements.found if (address := a.get("xlink:href") or "").startswith("#")}
    used |= set(re.findall(r"url\(#(\w+)\)", gallery()))
    assert used <= set(ids)
    assert elements.all("html") == [{"lang": "en"}]
    assert len(elements.all("h1")) == 1
    assert all(th.get("scope") in ("col", "row") for th in elements.all("th"))
    svgs = elements.all("svg")
    assert all(svg.get("role") == "img" or svg.get("aria-hidden") == "true" for svg in svgs)
    figures = re.findall(r"<figure>.*?</figure>", gallery(), re.DOTALL)
    assert all(re.search(r'role="img"><title>.+?</title>', figure) for figure in figures)
    assert all(re.search(r"<figcaption>.{40,}</figcaption>", figure) for figure in figures)


def titles(*runs: Record) -> list[str]:
    return re.findall(r"<h3>(.*?)</h3>", page.render(runs))


@pytest.mark.slow
def test_what_has_no_data_is_not_shown() -> None:
    assert titles(make("dense", timed=False)) == ["Training cost per epoch", "Accuracy per epoch"]
    assert "step against dense" not in page.render([make(timed=False)])
    assert "step against dense" in page.render([make()])
    silent = [dataclasses.replace(epoch, test_accuracy=None) for epoch in make().history]
    assert "Accuracy per epoch" not in titles(make(history=tuple(silent)))
    assert titles(make("dense", timed=False, epochs=1)) == []


@pytest.mark.slow
def test_a_single_run_has_no_plots_of_one_dot() -> None:
    compared = {"Accuracy and training cost", "Accuracy and FLOPs", "Saving in training cost and FLOPs"}
    compared.add("Time of the whole training")
    assert compared.isdisjoint(titles(make()))
    assert compared <= set(titles(make(), make("dense")))


def test_keep_probabilities_are_those_of_the_papers_policy() -> None:
    """A policy without probabilities has s = 0 or 1."""
    learned = make()
    certain = [dataclasses.replace(e, keep_probs=e.keep_probs and (9, *[0] * 18, 1)) for e in learned.history]
    assert "Keep-probabilities over time" in titles(learned)
    assert "Keep-probabilities over time" not in titles(dataclasses.replace(learned, history=tuple(certain)))


def test_widths_over_time_and_flops_by_layer() -> None:
    layers = (Layer("a", 64, 32, 1_000_000, 250_000), Layer("b", 64, 4, 2_000_000, 100_000), Layer("fc", 10, 10))
    structures = (
        Structure(0.0, {"a": 16, "b": 16, "fc": 10}),
        Structure(1.5, {"a": 32, "b": 4, "fc": 10}),
        Structure(3.0, {"a": 32, "b": 4, "fc": 10}, removed_layers=("b",)),
    )
    content = page.render([make(layers=layers, structures=structures)])
    drawing = content[content.index("<title>Widths over time") :].split("</figcaption>")[0]
    texts = re.findall(r"<text[^>]*>(.*?)</text>", drawing)
    assert {"a", "b", "32 of 64", "removed", "2 changes"} <= set(texts)
    assert "fc" not in texts  # its width cannot change
    assert "up to a factor of 4.00" in drawing
    strips = re.findall(r"fill: var\(--(series-\d)\)(?:; opacity: ([\d.]+))?", drawing)
    assert [strip for strip in strips if strip[1] != "0"] == [
        *[("series-1", "0.5")] * 2,  # a: twice as wide, from the first change on
        ("series-2", ""),  # b: a quarter, until it is removed
    ]
    assert "the layer was removed" in drawing
    assert "FLOPs by layer" in content
    assert "Widths over time" not in page.render([make(structures=None)])
    assert "Widths over time" not in page.render([make(structures=structures[:1])])


def test_extreme_numbers_are_drawn() -> None:
    low = make(
        seed=1, ratio=1e-9, flops=0, flops_ratio=0.0, train_flops=0, accuracy=0.0, params_ratio=0.0, train_seconds=0.0,
        step_ms=1e-9, peak_memory_bytes=0, layers=(), history=(),
    )  # fmt: skip
    high = make(
        "uniform", seed=2, train_flops=10**30, flops_ratio=1e30, accuracy=100.0, train_seconds=1e30, step_ms=1e30
    )
    empty = dataclasses.replace(make().history[0], keep_probs=(0,) * 20)
    none = make("grow", history=(empty,))
    half = [make("half", seed=0, history=()), make("half", seed=1)]
    assert "nan" not in "".join(re.findall(r'(?:d|x|y|points)="[^"]*"', page.render([low, high, none, *half])))


@pytest.mark.slow
def test_long_runs_stay_small_and_quick() -> None:
    runs = [make(seed=seed, epochs=10_000) for seed in range(2)]
    start = time.perf_counter()
    content = page.render(runs)
    assert time.perf_counter() - start < 20  # about 2 s on an idle machine
    assert len(content.encode()) < 200_000


def test_curves_join_seeds_and_neighbouring_epochs() -> None:
    runs = [make(seed=seed, epochs=400) for seed in range(3)]
    points = plots.joined(runs, lambda epoch: epoch.test_accuracy)
    assert len(points) == 134  # 400 epochs in bins of 3 = ceil(400 / 160), the last of 1
    found = [run.history[i].test_accuracy for i in (3, 4, 5) for run in runs]
    values = [value for value in found if value is not None]
    assert points[1] == pytest.approx((5.0, sum(values) / 9, min(values), max(values)))


def test_heat_is_the_root_of_the_share() -> None:
    run = make(epochs=10)
    heat = panels.densities(run)
    assert heat.shape == (20, 8)  # 8 of 10 epochs search
    bins = run.history[4].keep_probs
    assert bins is not None
    assert heat[:, 4] == pytest.approx([(count / sum(bins)) ** 0.5 for count in bins])


def test_points_lie_where_the_numbers_say() -> None:
    """Markers of two runs: equal accuracies are level, and the axis is one of logarithms."""
    cost = 3 * DENSE_FLOPS * IMAGES * 30
    runs = [
        make(m, accuracy=a, train_flops=f)
        for m, a, f in (("dense", 90, cost), ("a", 90, cost // 10), ("b", 80, cost // 100))
    ]
    content = page.render(runs)
    drawing = content[content.index("<title>Accuracy and training cost") :].split("</svg>")[0]
    at = re.findall(
        r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: var\(--(dense|series-\d)\)', drawing
    )
    (dense, a, b) = [(float(x), float(y)) for role in ("dense", "series-1", "series-2") for x, y, r in at if r == role]
    assert a[1] == pytest.approx(dense[1])
    assert b[1] > a[1]  # lower on the page
    assert dense[0] - a[0] == pytest.approx(a[0] - b[0], rel=1e-3)


@pytest.mark.slow
def test_a_missed_budget_is_seen() -> None:
    content = page.render([make(), make("uniform", flops_ratio=0.136)])
    assert "flops=0.1 (missed: 0.136)" in content
    assert "the finished network exceeds it by more than 2 %" in content
    drawing = content[content.index("<title>Accuracy and FLOPs") :].split("</svg>")[0]
    looks = re.findall(r'<use [^>]*style="([^"]*)"', drawing)
    assert looks == ["fill: var(--series-1); stroke: var(--series-1)", "fill-opacity: 0; stroke: var(--series-2)"]
    assert "Hollow points" in content
    assert "Hollow points" not in page.render([make()])


@pytest.mark.slow
def test_many_methods_share_axes_budget_by_budget() -> None:
    """Ten methods under five budgets: panels of one budget each, and no two methods look the same."""
    budgets = (0.4, 0.2, 0.1, 0.05, 0.02)
    names = [f"m{i}" for i in range(9)]
    runs = [make("dense", epochs=3)] + [make(name, ratio, epochs=3) for name in names for ratio in budgets]
    looks = series_of(summarise(runs))
    assert len({(one.role, one.marker, one.dashes) for one in looks}) == 10
    assert len({(one.role, one.dashes) for one in looks}) == 10  # curves have no markers
    figure = plots.train_cost_per_epoch(looks)
    assert figure.svg is not None
    for ratio in budgets:
        assert figure.svg.count(f"flops={ratio:g}<") == 1
    assert [text for _, text in figure.keys] == ["dense", *names]
    assert len(re.findall(r"<path d=[^>]*stroke: var\(--dense\)", figure.svg)) == len(budgets)  # in every panel
    drawing = plots.accuracy_by_flops(looks).svg
    assert drawing is not None
    lines = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity: 0.45', drawing)
    assert sorted(line.count("L") for line in lines if "L" in line) == [4] * 9  # one line through five budgets each


# --- colours ---------------------------------------------------------------------------------------------------------

TEMPLATE = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#\w{6})", root)) for root in re.findall(r":root \{(.*?)\}", TEMPLATE, re.DOTALL)
)
# How colours look without one kind of cone, on linear RGB (Machado, Oliveira, Fernandes 2009, severity 1).
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def rgb(color: str) -> list[float]:
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def linear(color: str) -> Any:
    srgb = np.array(rgb(color))
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """By WCAG 2."""
    light, dark = sorted((float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def lab(light: Any) -> Any:
    """CIE L*a*b*, D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(
        light, 0, 1
    )
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast_and_differ_for_the_colour_blind(colors: dict[str, str]) -> None:
    for background in (colors["page"], colors["surface"]):
        assert contrast(colors["ink"], background) > 12
        assert contrast(colors["muted"], background) > 4.5
        series = {role: color for role, color in colors.items() if role == "dense" or role.startswith("series")}
        assert all(contrast(color, background) > 3 for color in series.values())
    assert contrast(colors["accent"], colors["page"]) > 4.5
    assert len(series) == 7
    for kind, matrix in BLINDNESS.items():
        for one, other in itertools.combinations(series, 2):
            apart = np.linalg.norm(lab(matrix @ linear(series[one])) - lab(matrix @ linear(series[other])))
            assert apart > 10, (kind, one, other)  # about 2 can just be told apart side by side


# --- in a browser ----------------------------------------------------------------------------------------------------

MEASURE = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom].map(v => v + 0) };
const figures = [...document.querySelectorAll("figure > svg")].map(svg => ({
  title: svg.querySelector("title").textContent, box: box(svg), scale: svg.getScreenCTM().a,
  texts: [...svg.querySelectorAll("text")].filter(t => t.textContent.trim()).map(
    t => ({text: t.textContent, box: box(t), size: parseFloat(getComputedStyle(t).fontSize)}))}));
const root = document.documentElement;
const found = {width: innerWidth, scroll: root.scrollWidth, height: root.scrollHeight, figures};
parent.document.body.textContent = "measured" + JSON.stringify(found) + "measured";
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    names = (os.environ.get("SLIMSTART_BROWSER", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no chromium or chrome found; name one in SLIMSTART_BROWSER")
    return found


def open_in(browser: str, content: str, folder: Path, *options: str, dark: bool = False) -> str:
    file = folder / "page.html"
    file.write_text(content, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    common = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    command = [browser, *common, scheme, f"--user-data-dir={folder / 'profile'}", *options, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measure(browser: str, width: int, folder: Path) -> dict[str, Any]:
    """The page, with a script that its own policy would forbid, in a frame: a window cannot be as narrow as a phone."""
    content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", gallery()).replace("</body>", MEASURE)
    style = f"border: 0; width: {width}px; height: 900px"
    frame = f'<!doctype html><body><iframe style="{style}" srcdoc="{html.escape(content)}"></iframe>'
    dom = open_in(browser, frame, folder, "--window-size=1400,1000", "--dump-dom")
    found: dict[str, Any] = json.loads(html.unescape(dom.split("measured")[1]))
    return found


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_is_cut_off_or_too_small(browser: str, width: int, tmp_path: Path) -> None:
    found = measure(browser, width, tmp_path)
    assert found["width"] == width
    assert found["scroll"] <= width  # the page never moves sideways
    assert len(found["figures"]) == gallery().count("<figure>") > 20
    columns = {round(figure["box"][0]) for figure in found["figures"]}
    assert len(columns) == (1 if width < 900 else 2)
    for figure in found["figures"]:
        left, top, right, bottom = figure["box"]
        assert 0 <= left < right <= width
        for text in figure["texts"]:
            x0, y0, x1, y1 = text["box"]
            inside = left - 1 <= x0 and top - 1 <= y0 and x1 <= right + 1 and y1 <= bottom + 1
            assert inside, (figure["title"], text, figure["box"])
            assert text["size"] * figure["scale"] > 8.5, (figure["title"], text)
        for one, other in itertools.combinations(figure["texts"], 2):
            a, b = one["box"], other["box"]
            overlap = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            # Boxes are as high as a line, letters are not.
            assert overlap[0] < 1 or overlap[1] < 4, (figure["title"], one, other)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_light_and_dark_are_painted(browser: str, width: int, dark: bool, tmp_path: Path) -> None:
    found = measure(browser, width, tmp_path)
    picture = tmp_path / "picture.png"
    size = f"--window-size={width},{found['height']}"
    open_in(browser, gallery(), tmp_path, size, f"--screenshot={picture}", dark=dark)
    pixels = np.asarray(Image.open(picture).convert("RGB"), dtype=np.int16)
    assert pixels.shape == (found["height"], width, 3)
    colors = {name: 255 * np.array(rgb(color)) for name, color in (DARK if dark else LIGHT).items()}

    def count(area: Any, *roles: str, within: int = 12) -> int:
        return sum(int((abs(area - colors[role]).max(axis=2) < within).sum()) for role in roles)

    assert count(pixels[:, ::7], "page") > 0.5 * pixels[:, ::7, 0].size
    assert count(pixels[:400], "ink") > 300  # the title
    assert count(pixels[:400], "accent") > 20
    for figure in found["figures"]:
        left, top, right, bottom = (round(edge) for edge in figure["box"])
        area = pixels[top:bottom, left:right]
        assert count(area, "page") > 0.2 * area[..., 0].size, figure["title"]
        assert count(area, "muted", "ink", within=40) > 30, figure["title"]  # edges of letters are mixtures
        if "Keep-probabilities" in figure["title"]:
            assert (area[..., 2] - area[..., 0] > 40).mean() > 0.02, figure["title"]  # blue
        else:
            assert count(area, "dense", *(f"series-{i}" for i in range(1, 7)), within=40) > 25, figure["title"]
