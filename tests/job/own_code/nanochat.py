"""As nanochat: flat files that share a step, an optimizer per rank, meta_ before them."""

from job import Loop, save


def write(out, step):
    for name in (f"model_{step:06d}.pt", f"meta_{step:06d}.json"):
        save(out / name, step)
    for rank in range(2):
        save(out / f"optim_{step:06d}_rank{rank}.pt", step)


if __name__ == "__main__":
    Loop(write, line=lambda step, loss: f"step {step:05d}/99 (1%) | loss: {loss:.6f} | lrm: 1 | dt: 20.00ms").run()
