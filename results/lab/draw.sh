#!/usr/bin/env bash
# Draw what results/lab/run.sh has measured, and write its table and figures into docs/theory.md.
#
#     results/lab/draw.sh results/lab/runs             needs zeroblock[lab]; from a checkout: PYTHONPATH=src PYTHON=…
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${1:-results/lab/runs} page=${2:-docs/theory.md} python=${PYTHON:-python}
folders=()
for table in "$runs"/*/blocks.csv; do folders+=("$(dirname "$table")"); done
"$python" -c 'from zeroblock.cli import main; main()' lab draw "${folders[@]}" >"$runs/table.md"
rm -f "$runs"/*/*.pdf
"$python" - "$runs" "$page" "${folders[@]}" <<'PYTHON'
import os, pathlib, sys

runs, page, *folders = sys.argv[1:]
lines = [pathlib.Path(runs, "table.md").read_text().rstrip()]
for folder in folders:
    for name, title in (("blocks", "Alignment and choices by block"), ("adaptive", "Choices along the run")):
        picture = pathlib.Path(folder, f"{name}.png")
        if picture.is_file():
            link = os.path.relpath(picture, pathlib.Path(page).parent)
            lines.append(f"![{title}: {pathlib.Path(folder).name}]({link})")
text = pathlib.Path(page).read_text()
before, begin, rest = text.partition("<!-- runs -->\n")
_, end, after = rest.partition("<!-- end of runs -->")
if not (begin and end):
    sys.exit(f"{page} has no place for the runs, <!-- runs --> to <!-- end of runs -->")
pathlib.Path(page).write_text(f"{before}{begin}\n" + "\n\n".join(lines) + f"\n\n{end}{after}")
PYTHON
cat "$runs/table.md"
