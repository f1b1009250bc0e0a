"""Reading: local folders, the hub (a stand-in for ``datasets``), and bad data with file and line."""

from __future__ import annotations

import json
import sys
import types

import pytest
from task_rows import FIRST, GOLDEN

from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.task import TASKS, DataRow, Sizes, get
from zeroblock.task.reader import read_rows


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(("name", "row", "example"), FIRST)
@pytest.mark.parametrize("nested", [True, False])
def test_local_folder(name, row, example, nested, tmp_path):
    folder = tmp_path / name if nested else tmp_path
    write(folder / "train.jsonl", [row] * 3)
    write(folder / "validation.jsonl", [row])
    splits = TASKS[name].load(tmp_path)
    assert set(splits.train + splits.dev + splits.test) == {example}
    assert len(splits.train) + len(splits.dev) == 3
    assert len(splits.test) == 1


def test_rows_go_where_the_split_says(tmp_path):
    write(tmp_path / "train.jsonl", [{"sentence": f"t{i}", "label": i % 2} for i in range(40)])
    write(tmp_path / "validation.jsonl", [{"sentence": f"v{i}", "label": 0} for i in range(5)])
    splits = TASKS["sst2"].load(tmp_path, seed=1)
    parts = [{e.context.split(" ")[0] for e in part} for part in (splits.train, splits.dev, splits.test)]
    assert parts[0] | parts[1] == {f"t{i}" for i in range(40)}
    assert not parts[0] & parts[1]
    assert parts[2] == {f"v{i}" for i in range(5)}
    assert "27 train (of 1000), 13 dev (of 500), 5 test (of 1000)" in splits.note
    assert all(e.label == int(e.context.split(" ")[0][1:]) % 2 for e in splits.train)


def test_unicode_and_blank_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"sentence": "caf\xc3\xa9\xe2\x80\xa8noir", "label": 1}\r\n\n{"sentence": "x", "label": 0}'
    )
    rows = read_rows(path)
    assert [row.fields["sentence"] for row in rows] == ["café\u2028noir", "x"]
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]


GOOD = {"sentence": "fine", "label": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"label": 1}', "no column 'sentence'; the row has: label"),
        ('{"sentence": null, "label": 1}', "column 'sentence' is empty"),
        ('{"sentence": 3, "label": 1}', "column 'sentence' holds int, expected text"),
        ('{"sentence": "x"}', "no column 'label'"),
        ('{"sentence": "x", "label": 2}', "unknown label 2 in column 'label'; expected 0 to 1"),
        ('{"sentence": "x", "label": -1}', "unknown label -1 in column 'label'"),
        ('{"sentence": "x", "label": "pos"}', "unknown label 'pos'"),
        ('{"sentence": "x", "label": 1.0}', "unknown label 1.0"),
        ('{"sentence": "x", "label": 1', "invalid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"sentence": "\\ud800", "label": 1}', "not valid Unicode"),
    ],
)
def test_bad_row_is_named_by_file_and_line(line, message, tmp_path):
    path = tmp_path / "sst2" / "train.jsonl"
    write(path, [GOOD, GOOD])
    path.write_text(path.read_text() + "\n" + line + "\n")  # after an empty line: line 4
    write(tmp_path / "sst2" / "validation.jsonl", [GOOD])
    for seed in range(4):  # whichever rows a seed picks
        with pytest.raises(ZeroBlockError) as caught:
            TASKS["sst2"].load(tmp_path, seed=seed, sizes=Sizes(train=1, dev=0, test=1))
        assert str(caught.value).startswith(f"{path}:4: ")
        assert message in str(caught.value)


def test_bad_validation_row(tmp_path):
    write(tmp_path / "train.jsonl", [GOOD])
    write(tmp_path / "validation.jsonl", [GOOD, {"sentence": "x", "label": 5}])
    with pytest.raises(ZeroBlockError, match=r"validation\.jsonl:2: unknown label 5"):
        TASKS["sst2"].load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("copa", {"choice2": "  "}, "option 2 of 2 is empty"),
        ("copa", {"question": "why"}, "unknown question 'why'; expected 'cause' or 'effect'"),
        ("cb", {"label": 3}, "unknown label 3"),
        ("record", {"entities": ["Oslo", "", "Oslo FC"]}, "option 2 of 3 is empty"),
        ("record", {"entities": ["Bergen"]}, "unknown label: the answer 'Oslo FC' is not among the entities"),
        ("record", {"entities": []}, "unknown label"),
        ("record", {"answers": []}, "no option is right"),
        ("record", {"answers": "Oslo"}, "column 'answers' holds str, expected a list of texts"),
        ("record", {"query": "no gap"}, "the query has no @placeholder"),
        ("squad", {"answers": {"text": []}}, "there are no answers"),
        ("squad", {"answers": {"text": [""]}}, "option 1 of 1 is empty"),
        ("squad", {"answers": ["Jan"]}, "no column 'answers.text'"),
        ("drop", {"answers_spans": {"spans": [5]}}, "column 'answers_spans.spans' holds int, expected text"),
    ],
)
def test_bad_fields(name, change, message):
    with pytest.raises(ZeroBlockError) as caught:
        TASKS[name].example(DataRow(GOLDEN[name][0][0] | change, "f.jsonl:9"))
    assert str(caught.value).startswith("f.jsonl:9: ")
    assert message in str(caught.value)


def test_not_utf8(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"sentence": "x", "label": 1}\n{"sentence": "\xff", "label": 1}\n')
    with pytest.raises(ZeroBlockError, match=r"train\.jsonl:2: not UTF-8"):
        read_rows(tmp_path / "train.jsonl")


def test_missing_places_say_where_it_looked(tmp_path):
    with pytest.raises(ZeroBlockError) as caught:
        TASKS["rte"].load(tmp_path)
    assert str(tmp_path / "rte" / "train.jsonl") in str(caught.value)
    assert str(tmp_path / "train.jsonl") in str(caught.value)
    with pytest.raises(ZeroBlockError, match="nowhere is not a folder"):
        TASKS["rte"].load(tmp_path / "nowhere")
    write(tmp_path / "train.jsonl", [GOOD])
    with pytest.raises(ZeroBlockError, match=r"no validation data for sst2: looked for .*validation\.jsonl"):
        TASKS["sst2"].load(tmp_path)


def test_empty_file(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ZeroBlockError, match="no rows in"):
        read_rows(tmp_path / "train.jsonl")


def test_unknown_task():
    with pytest.raises(ZeroBlockError, match="unknown task 'sts2'; did you mean 'sst2'"):
        get("sts2")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package ``datasets`` that counts the rows it gives out."""
    seen = {"calls": [], "rows": 0}

    class Table:
        def __len__(self):
            return 5000

        def __getitem__(self, index):
            assert isinstance(index, int)
            seen["rows"] += 1
            return {"text": f"t{index}", "span1_text": "Ned", "span2_text": "He", "label": 0 if index else 7}

    def load_dataset(path, config=None, *, split):
        seen["calls"].append((path, config, split))
        return Table()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return seen


def test_hub(hub):
    splits = TASKS["wsc"].load(seed=0)
    assert hub["calls"] == [("super_glue", "wsc.fixed", "train"), ("super_glue", "wsc.fixed", "validation")]
    assert tuple(map(len, (splits.train, splits.dev, splits.test))) == (1000, 500, 1000)
    assert hub["rows"] == 2500  # no more than are wanted
    with pytest.raises(ZeroBlockError, match=r"super_glue/wsc\.fixed train\[0\]: unknown label 7"):
        TASKS["wsc"].example(TASKS["wsc"].rows("train")[0])


def test_hub_that_cannot_be_reached(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route\nat all")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ZeroBlockError, match=r"cannot get squad from the hub \(no route\); try again, or point --data"):
        TASKS["squad"].load()


def test_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ZeroBlockError, match="pip install datasets, or point --data at a folder"):
        TASKS["sst2"].load()


def test_a_dataset_that_is_a_script_comes_from_the_hubs_conversion(monkeypatch):
    asked = []

    def load_dataset(path, config=None, **options):
        asked.append((path, config, options))
        if path != "parquet":
            raise RuntimeError(f"Dataset scripts are no longer supported, but found {path}.py")
        return [{"premise": "It rains.", "hypothesis": "It is wet.", "label": 0}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (row,) = get("rte").rows("train")
    assert row.text("premise") == "It rains."
    (path, config, _), (_, _, options) = asked
    assert options == {
        "data_files": f"hf://datasets/{path}@refs%2Fconvert%2Fparquet/{config}/train/*.parquet",
        "split": "train",
    }


def test_a_number_of_too_many_digits_is_one_line(tmp_path):
    """Python converts at most 4,300 digits, and says so in an exception of its own."""
    (tmp_path / "sst2").mkdir()
    good = '{"sentence": "a", "label": 0}\n'
    (tmp_path / "sst2" / "train.jsonl").write_text(good + '{"sentence": "a", "label": ' + "9" * 5000 + "}\n")
    (tmp_path / "sst2" / "validation.jsonl").write_text(good)
    with pytest.raises(ZeroBlockError, match=r"train\.jsonl:2: invalid JSON \(a number has too many digits\)"):
        get("sst2").load(tmp_path)


def test_the_old_name_of_a_row_is_accepted():
    import zeroblock.task

    with pytest.warns(ZeroBlockWarning, match="now called DataRow"):
        assert zeroblock.task.Row is DataRow
    with pytest.raises(AttributeError, match="Rows"):
        _ = zeroblock.task.Rows
