"""As transformers' Trainer: a folder per checkpoint, trainer_state.json last, a bar of carriage returns, the oldest
ones removed.
"""

import shutil

from job import Loop, save


def write(out, step):
    folder = out / f"checkpoint-{step}"
    folder.mkdir(exist_ok=True)
    for name in ("model.bin", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        save(folder / name, step)
    old = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[:-2]
    for path in old:
        shutil.rmtree(path)


if __name__ == "__main__":
    loop = Loop(write, end="")
    loop.line = lambda step, loss: f"\r{100 * step // loop.given.steps:3d}%|##| {step}/{loop.given.steps} [00:01<00:09]"
    loop.run()
