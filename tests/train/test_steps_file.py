"""``steps.csv`` grows by what is new, and is cut back to the journal when a run is resumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from loop_toy import Kill, kept, settings, undisturbed

from zeroblock import atomic
from zeroblock.evaluate.evaluator import Evaluation
from zeroblock.evaluate.measurement import Measurement
from zeroblock.record import Record
from zeroblock.train import resume, run
from zeroblock.train import session as sessions
from zeroblock.train.folder import Folder


def test_a_step_is_written_once(llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten evaluations of twenty steps: each row goes to the file once, whatever the file holds already."""
    rows: list[int] = []
    add = Folder.add_steps

    def counting(self: Folder, records: Any) -> None:
        records = list(records)
        rows.extend(record.step for record in records)
        add(self, records)

    monkeypatch.setattr(Folder, "add_steps", counting)
    written: list[str] = []
    write = atomic.write
    monkeypatch.setattr(atomic, "write", lambda path, text: (written.append(path.name), write(path, text))[1])
    run(settings(llama, data, steps=20, eval_every=2), tmp_path / "run")
    assert rows == list(range(20))
    assert "steps.csv" not in written
    with (tmp_path / "run" / "steps.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(20))


def test_steps_do_not_pile_up_in_memory(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "BUFFERED_STEPS", 3)
    most = 0
    on_step = sessions.Session._on_step

    def counted(self: sessions.Session, record: Record) -> None:
        nonlocal most
        on_step(self, record)
        most = max(most, len(self.unwritten))

    monkeypatch.setattr(sessions.Session, "_on_step", counted)
    whole = run(settings(llama, data, steps=20, eval_every=20), tmp_path / "run")
    assert most == 2
    monkeypatch.undo()
    assert kept(whole.folder) == kept(run(settings(llama, data, steps=20, eval_every=20), tmp_path / "other").folder)


@pytest.mark.parametrize("how", ["too long", "torn", "missing"])
def test_resuming_cuts_it_back_to_the_journal(how: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data)
    whole = undisturbed(config)
    run(config, tmp_path / "run", Kill(6))
    file = tmp_path / "run" / "steps.csv"
    match how:
        case "too long":  # the journal lost its last steps
            file.write_text(file.read_text() + "6,0,1,1,1\n7,0,1,1,1\n")
        case "torn":
            file.write_text(file.read_text()[:-7])
        case _:
            file.unlink()
    resume(tmp_path / "run")
    assert whole == kept(tmp_path / "run")


def test_a_step_is_looked_up_among_many_measurements(tmp_path: Path) -> None:
    """Each look-up compared all measurements: 20,000 evaluations took 400 million comparisons."""

    class Counted(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return int.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = int.__hash__

    folder = Folder(tmp_path)
    for step in range(500):
        folder.measured(Measurement(Counted(step), "dev", Evaluation("f1", 0.0, 0.0, 1, 0.0), 0.0))
    Counted.compared = 0
    assert all(folder.splits_at(step) == {"dev"} for step in range(500))
    assert folder.splits_at(500) == set()
    assert Counted.compared < 2000
