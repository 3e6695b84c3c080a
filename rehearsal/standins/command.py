"""The command of a rehearsal with --plumbing: prints steps and writes files by told.json beside it. It imports nothing
of the project: it runs where the user's script would.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

COUNT = re.compile(r"\{(?:step|epoch)(?::([0-9a-z]+))?\}")


def main() -> None:
    told = json.loads(Path(__file__).with_name("told.json").read_text())
    asked: list[int] = []
    if told["saves"]:
        signal.signal(getattr(signal, f"SIG{told['signal']}"), lambda number, _: asked.append(number))
    for step in range(int(os.environ.get("GPUFLEET_RESUME_STEP") or 0) + 1, told["steps"] + 1):
        time.sleep(told["pace_s"])
        print("plumbing step", step, flush=True)  # noqa: T201 - that is how it tells
        if told["every"] <= told["steps"] and (asked or step % told["every"] == 0 or step == told["steps"]):
            save(Path(sys.argv[1]), step, told)
        if asked:
            return


def save(folder: Path, step: int, told: dict[str, object]) -> None:
    """Writes one checkpoint, with the deciding file last."""
    names = [str(name) for name in told["names"]]  # type: ignore[attr-defined]
    for pattern in names:
        name = COUNT.sub(lambda found: format(step, found[1] or ""), pattern).replace("*", "0")
        if not name.endswith("/"):
            write(folder / name, told, len(names))
            continue
        write(folder / name / "weights.bin", told, len(names))
        if told["complete"]:
            write(folder / name / str(told["complete"]), told, len(names))


def write(path: Path, told: dict[str, object], parts: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = path.name == told["complete"] or path.suffix in (".json", ".yaml")
    path.write_bytes(b"{}" if small else os.urandom(int(str(told["bytes"])) // parts))


if __name__ == "__main__":
    main()
