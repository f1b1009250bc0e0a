"""report.html of a run and of a sweep, opened in a real browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_page import folder as old_folder

from browser import Browser, Visit, needs_browser
from zeroblock.cli.report import report as command
from zeroblock.errors import ZeroBlockError
from zeroblock.report import html_chart, html_run, html_sweep
from zeroblock.train import Config, run

HOSTILE = "</script><script>console.error('x')</script><img src=x onerror=\"console.error('y')\">&amp;'\x1b[2J"
FIGURES = """(() => {
  const drawn = [...document.querySelectorAll(".figure")].map((figure) => {
    const shapes = [...figure.querySelectorAll("svg path, svg circle, .bar i")].map((e) => e.getBoundingClientRect());
    return [figure.querySelector("h2").textContent, shapes.filter((s) => s.width + s.height > 1).length];
  });
  const tips = [...document.querySelectorAll("svg[data-lines], svg[data-cells]")].map((svg) => {
    const at = svg.getBoundingClientRect();
    const point = { clientX: at.left + at.width / 2, clientY: at.top + 20, bubbles: true };
    svg.dispatchEvent(new PointerEvent("pointermove", point));
    return document.getElementById("tip").innerText;
  });
  const wide = document.documentElement.scrollWidth > innerWidth;
  const count = (name) => document.querySelectorAll(name).length;
  const page = getComputedStyle(document.body).backgroundColor;
  return { drawn, tips, wide, page, img: count("img"), script: count("script"), text: document.body.innerText };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def trained(llama: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of twelve steps with three evaluations."""
    config = Config(
        model=str(llama), task="sst2", data=str(data), lr=1e-3, steps=12, eval_every=6, batch_size=4, train=30, dev=8,
        test=8, device="cpu",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(config, folder).summary is not None
    return folder


def look(browser: Browser, path: Path, **options: object) -> Visit:
    visit = browser.open(path.as_uri(), ask=FIGURES, **options)  # type: ignore[arg-type]
    assert visit.problems == []
    assert visit.requests == [path.as_uri()]
    assert not visit.answer["wide"], "the page scrolls sideways"
    return visit


@needs_browser
def test_a_run_in_the_browser(browser: Browser, trained: Path) -> None:
    seen = look(browser, trained / "report.html")
    drawn = dict(seen.answer["drawn"])
    assert list(drawn) == ["Loss", "Held-out accuracy", "Which block moved when", "Step sizes by block"]
    assert min(drawn.values()) >= 4
    loss, metric, activity = seen.answer["tips"]
    assert loss.startswith("step ")
    assert "dev: " in loss
    assert " %" in metric
    assert "model." in activity
    for part in ("before training", "12 of 12", "moved in all", "Rebuild the weights", "torch", "SGD()", "batch_size"):
        assert part in seen.answer["text"], part
    narrow = look(browser, trained / "report.html", width=390, dark=True)
    assert narrow.answer["drawn"] == seen.answer["drawn"]
    assert narrow.answer["page"] != seen.answer["page"]


def test_the_table_of_blocks_says_how_far_each_moved(trained: Path) -> None:
    """The share is lr·|c| over the rms of the block's weights, from numbers computed here."""
    source = html_run.read_source(trained)
    block = int(source.steps["block"][0])
    about = source.about["blocks"][block]
    mine = source.steps["block"] == block
    moves = np.abs(source.steps["coeff"][mine]) * source.steps["lr"][mine] / about["rms"]
    row = html_run.report(source).partition(f"<td>{about['name']}</td>")[2].partition("</tr>")[0]
    assert f"{100 * np.median(moves):.3f} %" in row
    assert f"{100 * np.sqrt((moves**2).sum()):.2f} %" in row


def test_a_run_under_way_says_how_to_continue(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "half"))
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:4]))
    (folder / "steps.csv").write_text("".join((folder / "steps.csv").read_text().splitlines(keepends=True)[:7]))
    text = html_run.write_report(folder).read_text()
    assert "not finished" in text
    assert "step 6 of 12" in text
    assert f"zeroblock resume {folder}" in text
    assert f"zeroblock replay {folder} --step 6" in text
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    assert "No result yet" in html_run.write_report(folder).read_text()
    (folder / "about.json").unlink()
    assert "model.layers.0" in html_run.write_report(folder).read_text(), "the journal knows the names too"


def test_a_run_that_got_worse_says_so(tmp_path: Path) -> None:
    folder = old_folder(tmp_path)
    metrics = folder / "metrics.jsonl"
    assert "The model got worse" not in html_run.write_report(folder).read_text()
    metrics.write_text(metrics.read_text().replace('"value": 0.79', '"value": 0.41'))
    assert "The model got worse" in html_run.write_report(folder).read_text()


def test_the_page_and_the_summary_agree_on_what_is_worse(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "chance"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def page(before: float, after: float) -> str:
        changed = [line | {"value": after if line["step"] else before, "loss": 0.5} for line in lines]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        return html_run.write_report(folder).read_text()

    assert "The model got worse" not in page(0.625, 0.5), "one of eight examples is chance"
    text = page(0.75, 0.25)
    assert "worse than before training: test accuracy 25.0%, was 75.0%. Try a smaller learning rate (--lr 3e-4)" in text


def test_the_loss_comes_first_where_the_metric_says_nothing(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "silent"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = {0: 0.875, json.loads((folder / "summary.json").read_text())["selected_step"]: 0.625}
    changed = [line | {"value": 0.0, "loss": told.get(line["step"], 0.7)} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    text = html_run.write_report(folder).read_text()
    assert '<div class="was">0.875</div>' in text
    assert '<div class="big">0.625</div>' in text
    assert "The model got worse" not in text
    summary = json.loads((folder / "summary.json").read_text()) | {"metric": "likelihood"}
    (folder / "summary.json").write_text(json.dumps(summary))
    likely = [line | {"metric": "likelihood", "value": 0.1 + line["step"] / 100} for line in changed]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in likely))
    result = html_run.write_report(folder).read_text().partition("<h2>Result")[2].partition("</section>")[0]
    assert '<div class="big">0.625</div>' in result
    assert "likelihood" not in result


@needs_browser
def test_text_of_files_is_never_markup(browser: Browser, trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "forged"))
    summary, about = (json.loads((folder / name).read_text()) for name in ("summary.json", "about.json"))
    summary |= {"metric": HOSTILE, "selected_by": HOSTILE}
    about |= {"machine": HOSTILE, "versions": {HOSTILE: HOSTILE}, "began": HOSTILE}
    for block in about["blocks"]:
        block["name"] = HOSTILE
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "about.json").write_text(json.dumps(about))
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(f"# zeroblock {HOSTILE}".replace("\x1b", "") + "\n" + config.partition("\n")[2])
    seen = look(browser, html_run.write_report(folder))
    assert (seen.answer["img"], seen.answer["script"]) == (0, 1)
    assert seen.answer["text"].count("<img src=x") >= 5
    assert "\x1b" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": 10**400}, "weights is 1000"),
        ({"blocks": [{"name": "a", "rms": -1.0}]}, "rms is -1.0"),
        ({"blocks": [{"weights": 1}]}, "a block has no name"),
        ({"blocks": {}}, "blocks is not a list"),
        ({"versions": []}, "versions is not an object"),
    ],
)
def test_a_forged_about_is_one_line(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    folder = old_folder(tmp_path)
    (folder / "about.json").write_text(json.dumps(change))
    with pytest.raises(ZeroBlockError, match=rf"about.json is damaged \({reason}"):
        html_run.write_report(folder)


def test_thousands_of_steps_and_blocks_make_a_small_page(tmp_path: Path) -> None:
    folder = old_folder(tmp_path, steps=5000, blocks=300, spike=True)
    text = html_run.write_report(folder).read_text()
    assert len(text) < 400_000
    assert text.count("block 0 … block 3") == 1, "blocks share rows"


def test_a_spike_stays_outside(tmp_path: Path) -> None:
    losses = np.linspace(1.0, 0.4, 1000)
    losses[[7, 400]] = 1e9, np.nan
    low, high = html_chart.view(losses, [0.3, float("nan")])
    assert 0.2 < low < 0.3
    assert 1.0 < high < 1.1
    x, y = html_chart.gathered(np.arange(1000), losses)
    assert len(x) == len(y) == html_chart.MAX_POINTS
    assert np.all(y[:, 0] <= y[:, 1])
    assert y[:, 1].max() < 1.01


def save_sweep(folder: Path, name: str = "lr & seeds") -> Path:
    (folder / "table.md").write_text(f"# {name}\n\n    zeroblock sweep mine.toml\n")
    (folder / "table.csv").write_text(
        "row,task,metric,test,test_std,best,best_std,n,seeds,chosen,whole_grid\n"
        f"{name},sst2,accuracy,0.8,0.05,0.82,,2,2,lr 0.001,true\nplain,sst2,accuracy,0.6,,0.6,,1,1,,true\n"
    )
    rows = [
        f"{name},sst2,{lr},{seed},finished,{str(lr == 0.001).lower()},accuracy,0.7,0.5,{0.7 + seed / 10},0.9,10,10,3.5"
        for lr in (0.001, 0.01)
        for seed in (0, 1)
    ]
    rows = [f"run{i},{row}" for i, row in enumerate(rows)] + ["last,plain,sst2,,,failed,false,,,,,,,,"]
    head = "run,row,task,lr,seed,state,chosen,metric,dev,dev_loss,test,best,steps,selected_step,seconds"
    (folder / "runs.csv").write_text("\n".join([head, *rows]) + "\n")
    return folder


@needs_browser
def test_a_sweep_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    hostile = HOSTILE.replace('"', "").replace(",", "")
    (tmp_path / "runs" / "run0").mkdir(parents=True)
    (tmp_path / "runs" / "run0" / "report.html").write_text("")
    seen = look(browser, html_sweep.write_report(save_sweep(tmp_path, hostile)), width=390)
    (figure, shapes), *_ = seen.answer["drawn"]
    assert figure == "sst2: every run on test"
    assert shapes >= 5  # four runs and a mean
    assert (seen.answer["img"], seen.answer["script"]) == (0, 1)
    for part in ("80.0 % ± 5.0", "60.0 %", "4 runs finished", "1 failed", "lr 0.001", "zeroblock sweep mine.toml"):
        assert part in seen.answer["text"], part
    assert (tmp_path / "report.html").read_text().count('href="runs/run0/report.html"') == 1


def test_the_command_writes_either(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trained / "report.html").unlink()
    for place in (trained, save_sweep(tmp_path)):
        command(place)
        assert capsys.readouterr().out == f"{place / 'report.html'}\n"
        assert (place / "report.html").stat().st_size > 5_000
    (tmp_path / "runs.csv").write_text("run\nx\n")
    with pytest.raises(ZeroBlockError, match=r"runs\.csv has no column"):
        command(tmp_path)
    with pytest.raises(ZeroBlockError, match="neither a run"):
        command(tmp_path / "nothing")
