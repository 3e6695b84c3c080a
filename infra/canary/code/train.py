"""The canary's script: it counts steps, saves small and large checkpoints by turns, and reports what can be reached
from its container. The script fails once, at the step `fails_at`, so that its node ends itself. A node that resumes
from that step does not fail.

The script uses torch's GPU where the image brings torch, and imports nothing else, so that any Python runs it.
"""

import json
import os
import pathlib
import sys
import time
import urllib.request

SMALL, LARGE = 1_000_000, 64_000_000  # bytes
ELSEWHERE = 3  # the definition file says that after this exit code another node has to continue
METADATA = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")


def metadata_is_reached() -> bool:
    """Whether EC2's metadata service answers this container, which has no role and must not get one from there."""
    asked = urllib.request.Request(
        f"{METADATA}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=3) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def gpu() -> str:
    """torch's name of the GPU, after a matrix product on it; empty if there is no torch or no GPU."""
    try:
        import torch
    except ImportError:
        return ""
    if not torch.cuda.is_available():
        return ""
    square = torch.ones(256, 256, device="cuda")
    return torch.cuda.get_device_name() if float((square @ square)[0, 0]) == 256 else "computes wrongly"


def main(
    checkpoints: pathlib.Path, outputs: pathlib.Path, steps: int, pace_s: float, every: int, fails_at: int = 0
) -> None:
    resumed = int(os.environ.get("GPUFLEET_RESUME_STEP") or 0)
    for step in range(resumed + 1, steps + 1):
        time.sleep(pace_s)
        print(f"step {step} loss {1 / step:.6f}", flush=True)  # noqa: T201 - that is how it tells
        if step % every == 0:
            folder = checkpoints / f"step-{step}"
            folder.mkdir(exist_ok=True)
            (folder / "weights.bin").write_bytes(os.urandom(LARGE if step // every % 2 else SMALL))
            (folder / "whole").touch()
        if step == fails_at and resumed < fails_at - every:
            sys.exit(ELSEWHERE)
    seen = {"resumed": resumed, "gpu": gpu(), "metadata": metadata_is_reached(), "user": os.getuid()}
    (outputs / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(pathlib.Path(given[0]), pathlib.Path(given[1]), int(given[2]), float(given[3]), *map(int, given[4:]))
