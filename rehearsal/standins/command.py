"""The command of a rehearsal with --plumbing. The command prints steps and writes files as told.json beside this file
says. The command imports nothing of the project, because it runs where the user's script would.
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
    plan = json.loads(Path(__file__).with_name("told.json").read_text())
    asked: list[int] = []
    if plan["saves"]:
        signal.signal(getattr(signal, f"SIG{plan['signal']}"), lambda number, _: asked.append(number))
    for step in range(int(os.environ.get("GPUFLEET_RESUME_STEP") or 0) + 1, plan["steps"] + 1):
        time.sleep(plan["pace_s"])
        print("plumbing step", step, flush=True)  # noqa: T201 - that is how it tells
        if plan["every"] <= plan["steps"] and (asked or step % plan["every"] == 0 or step == plan["steps"]):
            save(Path(sys.argv[1]), step, plan)
        if asked:
            return


def save(folder: Path, step: int, plan: dict[str, object]) -> None:
    """Writes one checkpoint. The file that completes it is written last."""
    names = [str(name) for name in plan["names"]]  # type: ignore[attr-defined]
    for pattern in names:
        name = COUNT.sub(lambda match: format(step, match[1] or ""), pattern).replace("*", "0")
        if not name.endswith("/"):
            write(folder / name, plan, len(names))
            continue
        write(folder / name / "weights.bin", plan, len(names))
        if plan["complete"]:
            write(folder / name / str(plan["complete"]), plan, len(names))


def write(path: Path, plan: dict[str, object], parts: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = path.name == plan["complete"] or path.suffix in (".json", ".yaml")
    path.write_bytes(b"{}" if small else os.urandom(int(str(plan["bytes"])) // parts))


if __name__ == "__main__":
    main()
